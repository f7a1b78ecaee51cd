"""Ranks under torchrun, over gloo: real processes."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ..support.parity import EVERYWHERE, PLANS

SCRIPT = Path(__file__).parents[1] / "support" / "ranks.py"


def start(job: str, folder: Path, ranks: int = 2, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", str(restarts)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, str(SCRIPT), job, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def results(job: str, folder: Path, ranks: int = 2) -> list[dict]:
    done = start(job, folder, ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_train_as_one_process_does(tmp_path, ranks):
    for found in results("parity", tmp_path, ranks):
        assert len(found) == (len(PLANS) if ranks == 2 else len(EVERYWHERE)) + 2 * len(EVERYWHERE)
        for case, distance in found.items():
            assert distance["loss"] < 1e-12, case
            assert distance["gradient"] < 1e-12, case
            assert distance["parameter"] < 1e-9, case
            assert distance["buffer"] < 1e-9, case


def test_ranks_update_as_one_process_does_in_bf16_clipped_and_over_two_batches(tmp_path):
    first, second = results("updates", tmp_path)
    for case, found in first.items():
        assert found["norm"][0] == second[case]["norm"][0]
        assert found["norm"][0] == pytest.approx(found["norm"][1], rel=1e-5)
        assert max(found["distance"], second[case]["distance"]) < 1e-5
    assert any("torch.bfloat16" in found["dtypes"] for found in first.values())


def test_each_rank_holds_its_own_stages_alone(tmp_path):
    first, second = results("ownership", tmp_path)
    for found in (first, second):
        assert found["here"] == found["planned"]
        assert found["with state"] == len(found["here"])
    assert set(first["here"]) | set(second["here"]) == set(first["all"])
    assert set(first["here"]) & set(second["here"]) == {"embedding.weight"}  # tied: a replica in both


def test_what_stays_python_trains_over_ranks_and_shapes(tmp_path):
    first, second = results("python", tmp_path)
    for found in (first, second):
        assert max(found["distance"]) < 1e-9
        assert found["regions"] == ["3", "the end of the step"]
    assert first["metrics"] == second["metrics"]


def test_ranks_change_shapes_together(tmp_path):
    first, second = results("shapes", tmp_path)
    for found in (first, second):
        assert found["distance"] < 1e-9
        assert found["afterwards"] < 1e-9
    assert [text.split(" (")[0].split(":")[0] for text in first["said"]] == [
        "microbatches of a new shape",
        "batches keep changing shape",
    ]
    assert second["said"] == []
    assert first["failure"] == "RequestError: rank 1 cannot compile the step for this batch: ValueError: not here"
    assert second["failure"] == "ValueError: not here"


def test_every_rank_gets_the_whole_trace(tmp_path):
    first, second = results("traced", tmp_path)
    assert first == second
    kinds = {(device, action[1:].rstrip("0123456789<>")) for device, _, action, *_ in first["events"]}
    assert {(0, "F"), (1, "F"), (0, "B"), (1, "B"), (0, "SEND_F"), (1, "RECV_F"), (1, "SEND_B")} <= kinds
    assert all(start <= end for *_, start, end in first["events"])


def alone(
    job: str,
    folder: Path,
    ranks: int = 2,
    *,
    backend: str | None = None,
    absent: tuple[int, ...] = (),
    **more: str,
) -> list[subprocess.CompletedProcess[str]]:
    """Ranks whom nobody watches: an agent would stop those that are left, perhaps before they have said why."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    shared = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), job, str(folder), *([backend] if backend else [])],
            env={**os.environ, **shared, **more, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
        if rank not in absent
    ]
    done = []
    for process in started:
        out, err = process.communicate(timeout=240)
        done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    return done


@pytest.mark.parametrize(("job", "said"), [("killed", "rank 1 stopped answering"), ("raising", "rank 1 stopped")])
def test_when_one_rank_stops_the_others_stop_within_seconds_and_name_it(tmp_path, job, said):
    begun = time.monotonic()
    left, stopped = alone(job, tmp_path)
    assert left.returncode == 1
    assert stopped.returncode == (-signal.SIGKILL if job == "killed" else 1)
    assert said in left.stderr
    assert time.monotonic() - begun < 60  # imports and rendezvous are most of it; a hang would be 240


def test_torchrun_ends_when_a_rank_is_killed(tmp_path):
    begun = time.monotonic()
    done = start("killed", tmp_path)
    assert done.returncode != 0
    assert "SIGKILL" in done.stderr
    assert left_over(tmp_path) == []
    assert time.monotonic() - begun < 60


@pytest.mark.slow
def test_a_rank_that_never_arrives_is_named(tmp_path):
    for one in alone("traced", tmp_path, 3, absent=(1,), PANPIPE_ARRIVAL_S="3"):
        assert one.returncode == 1
        assert "WorkerError: rank 1 of 3 did not arrive within 3 s" in one.stderr


@pytest.mark.slow
def test_rank_0_that_never_arrives_is_named(tmp_path):
    for one in alone("traced", tmp_path, 3, absent=(0,), PANPIPE_ARRIVAL_S="3"):
        assert one.returncode == 1
        assert "WorkerError: rank 0 did not arrive within 3 s" in one.stderr


def assert_all_name(victim: int, folder: Path, done: list[subprocess.CompletedProcess[str]]) -> None:
    """All ranks but a killed one ended within 10 s of that, with its name."""
    ended = time.time()
    assert (folder / "killed").exists(), [one.stderr[-1000:] for one in done]
    for rank, one in enumerate(done):
        if rank == victim:
            assert one.returncode == -signal.SIGKILL
        else:
            assert one.returncode == 1
            assert f"rank {victim} stopped" in one.stderr, one.stderr
    assert ended - (folder / "killed").stat().st_mtime < 10
    assert left_over(folder) == []


def left_over(folder: Path) -> list[int]:
    """Processes that were started with this folder and are still there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [int(path.parent.name)] if os.fsencode(folder) in path.read_bytes() else []
    return found


@pytest.mark.slow
@pytest.mark.parametrize("where", ["F", "B", "STEP"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_killed_inside_a_step_is_named_by_all_the_others(tmp_path, victim, where):
    assert_all_name(victim, tmp_path, alone("dying", tmp_path, 3, VICTIM=str(victim), WHERE=where))


@pytest.mark.slow
def test_a_rank_that_had_no_processor_meanwhile_names_the_killed_one_too(tmp_path):
    """Rank 0 keeps the store: gone before rank 1 had looked there, it was taken for the one that was killed."""
    assert_all_name(2, tmp_path, alone("dying", tmp_path, 3, VICTIM="2", WHERE="B", STARVED="1"))


@pytest.mark.slow
def test_a_rank_killed_while_the_others_wait_in_a_collective_is_named(tmp_path):
    left, killed, other = alone("gathering", tmp_path, 3)
    assert killed.returncode == -signal.SIGKILL
    for one in (left, other):
        assert one.returncode == 1
        assert "rank 1 stopped answering" in one.stderr


@pytest.mark.slow
def test_torchrun_restarts_a_job_whose_rank_was_killed(tmp_path):
    """Its store has why the first attempt stopped; the second one begins afresh."""
    done = start("dying_once", tmp_path, restarts=1)
    assert done.returncode == 0, done.stderr[-3000:]
