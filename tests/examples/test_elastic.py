"""The example that goes on with one replica when a node is lost: two agents of torchrun on one host."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ..support.launch import HANGS_S, SHARED, torchrun_script

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic.py"
UPDATES, EVERY = 200, 10


def agent(port: int, folder: Path, log: Path) -> subprocess.Popen[bytes]:
    """An agent with two ranks, in a process group of its own: a node."""
    options = [
        "--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "3", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "elastic", "--local-addr", "127.0.0.1",
        "--rdzv-conf", "last_call_timeout=20,keep_alive_interval=2,keep_alive_max_attempt=10",
    ]  # fmt: skip
    command = [str(EXAMPLE), "--folder", str(folder), "--updates", str(UPDATES), "--every", str(EVERY)]
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, *command],
            env={**os.environ, **SHARED}, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def wait_for(text: str, nodes: list[subprocess.Popen[bytes]], logs: list[Path]) -> None:
    """Wait until the log of a node has a text."""
    end = time.monotonic() + HANGS_S
    while not any(text in log.read_text(encoding="utf-8") for log in logs):
        alive = time.monotonic() < end and all(node.poll() is None for node in nodes)
        assert alive, [log.read_text(encoding="utf-8")[-3000:] for log in logs]
        time.sleep(0.01)


def wait_for_store(port: int) -> None:
    """Wait until an agent listens."""
    end = time.monotonic() + HANGS_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        assert time.monotonic() < end
        time.sleep(0.05)


def kill_node(node: subprocess.Popen[bytes]) -> None:
    """Kill an agent and its ranks, which have sessions of their own, at once."""
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(node.pid)], capture_output=True, text=True, check=True)
    for pid in [node.pid, *map(int, children.stdout.split())]:
        os.kill(pid, signal.SIGKILL)
    node.wait()


def updates_in(text: str) -> dict[int, tuple[float, int]]:
    """Update → loss and number of replicas, of its last run."""
    lines = re.findall(r"update (\d+): loss ([\d.]+), (\d) replicas", text)
    return {int(update): (float(loss), int(replicas)) for update, loss, replicas in lines}


@pytest.mark.slow
def test_job_goes_on_with_one_replica_when_a_node_is_lost(tmp_path):
    whole = tmp_path / "whole"
    undisturbed = torchrun_script(
        EXAMPLE, "--folder", str(whole), "--updates", str(UPDATES), "--every", str(EVERY), ranks=4
    )
    assert undisturbed.returncode == 0, undisturbed.stderr[-3000:]
    expected = updates_in(undisturbed.stdout)
    assert len(expected) == UPDATES

    folder, logs = tmp_path / "elastic", [tmp_path / f"node-{number}.log" for number in range(2)]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    nodes = [agent(port, folder, logs[0])]
    try:
        wait_for_store(port)  # the first agent that comes has it, and the other one will die
        nodes.append(agent(port, folder, logs[1]))
        wait_for(f"update {2 * EVERY + 2}:", nodes, logs)
        kill_node(nodes[1])
        assert nodes[0].wait(timeout=HANGS_S) == 0, logs[0].read_text(encoding="utf-8")[-3000:]
    finally:
        for node in nodes:
            if node.poll() is None:
                kill_node(node)
    found = updates_in("".join(log.read_text(encoding="utf-8") for log in reversed(logs)))
    replicas = [found[update][1] for update in range(1, UPDATES + 1)]
    resumed = replicas.index(1) + 1
    assert replicas == [2] * (resumed - 1) + [1] * (UPDATES - resumed + 1)
    assert resumed % EVERY == 1  # directly after a checkpoint
    for update, (loss, _) in expected.items():
        assert found[update][0] == pytest.approx(loss, rel=1e-4), update
    trained, wanted = (
        {name: value for file in each.glob("trained/*.safetensors") for name, value in load_file(file).items()}
        for each in (folder, whole)
    )
    assert trained.keys() == wanted.keys()
    torch.testing.assert_close(trained, wanted, rtol=1e-4, atol=1e-6)
