"""Ranks that end before all have arrived are named by the others within seconds. Ranks are started by hand."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ...support.launch import HANGS_S, SHARED

SCRIPT = Path(__file__).parents[2] / "support" / "ranks" / "early_death.py"


def start(how, victim, folder, timeout_s=120.0):
    """Start ranks without an agent, and wait for their ends; a victim that stops is killed when the others have ended.

    Returns:
        For each rank its status, its errors, and the seconds from the victim's end to its own.
    """
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    started = []
    for rank in range(2):
        own = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment = {**os.environ, **SHARED, **own, "PANPIPE_TIMEOUT_S": str(timeout_s)}
        command = [sys.executable, str(SCRIPT), how, str(victim), str(folder)]
        started.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    ended = [0.0] * 2
    deadline = time.monotonic() + HANGS_S
    while not all(ended) and time.monotonic() < deadline:
        ended = [
            at or (time.monotonic() if one.poll() is not None else 0.0) for at, one in zip(ended, started, strict=True)
        ]
        if ended[victim]:
            (folder / "victim ended").touch()
        if how.endswith("stopped") and all(at for rank, at in enumerate(ended) if rank != victim):
            started[victim].kill()
        time.sleep(0.05)
    return [(one.returncode, one.communicate()[1], at - ended[victim]) for one, at in zip(started, ended, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("when", ["capture", "group"])
@pytest.mark.parametrize("how", ["exception", "exit", "killed"])
def test_rank_that_ends_before_all_have_arrived_is_named_by_the_others(tmp_path, when, how, victim):
    found = start(f"{when} {how}", victim, tmp_path)
    status, errors, after_s = found[1 - victim]
    assert status == 1, errors
    assert f"rank {victim} stopped" in errors or f"rank {victim} has closed its pipeline before" in errors
    assert "Traceback" not in errors
    if how == "exception":
        assert "No module named 'another'" in errors
    assert after_s < 60  # within 10 s of the victim's end and of its own call of `panpipe.pipeline` on a quiet machine


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_rank_that_ends_before_the_other_begins_is_named_after_the_limit(tmp_path, victim):
    """Under torchrun, its agent ends the others at once."""
    status, errors, _ = start("alone killed", victim, tmp_path, timeout_s=5.0)[1 - victim]
    assert status == 1, errors
    assert re.search(rf"rank {victim}( of 2)? did not arrive within 5 s", errors), errors
    assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_rank_that_is_stopped_before_all_have_arrived_gives_no_sign_of_life(tmp_path, victim):
    """It is connected, so it did arrive, and what it did last is known."""
    status, errors, _ = start("capture stopped", victim, tmp_path, timeout_s=3.0)[1 - victim]
    assert status == 1, errors
    said = rf"rank {victim} gave no sign of life for [\d.]+ s and was last seen (outside of panpipe|in )"
    assert re.search(said, errors), errors
    assert "did not arrive" not in errors
    assert "Traceback" not in errors
