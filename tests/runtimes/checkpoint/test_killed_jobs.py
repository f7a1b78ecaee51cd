"""Jobs that are killed while they write checkpoints, and one whose disk is full."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import panpipe
import pytest
from panpipe.runtimes.checkpoint.reading import CheckpointReader

from ...support.ranks.forks import Fork, Forks

SCRIPT = Path(__file__).parents[2] / "support" / "ranks" / "checkpointing.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
KILLS = 20


@pytest.fixture(scope="module")
def forks():
    made = Forks(SCRIPT, ENVIRONMENT)
    yield made
    made.stop()


def run(forks, folder, steps, *how):
    folder.mkdir(exist_ok=True)
    (done,) = forks.run([Fork([str(folder), str(steps), *how], ENVIRONMENT)], 900)
    return done


def losses(text):
    """Step → loss, and the step that the process began with."""
    lines = [line.split() for line in text.splitlines()]
    return {int(step): loss for step, loss in lines if step != "begins"}, [int(n) for w, n in lines if w == "begins"]


def whole(folder):
    """The steps of the last checkpoint, after all of its files were compared with their hashes."""
    reader = CheckpointReader(panpipe.latest_checkpoint(folder))
    reader.check(reader.manifest.files)
    return reader.manifest.steps


def kill(folder, saves, delay_s, hits):
    """Kill the process while it writes its nth checkpoint or a later one: some time after the hidden folder appears.

    It is stopped first: if the checkpoint was complete by then, the process continues, and the next one is tried, after
    half of the time. So every kill falls into the writing of a checkpoint, however fast the machine is.
    """
    pid, deadline = folder / "pid", time.monotonic() + 800  # the machine may be busy
    while not pid.exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    seen = set()
    while time.monotonic() < deadline:
        new = {path.name for path in folder.glob(".partial-step-*")} - seen
        seen |= new
        if not new or len(seen) < saves:
            continue
        time.sleep(delay_s)
        process = int(pid.read_text(encoding="utf-8"))
        stop(process)
        if list(folder.glob(".partial-*")):
            hits.append(process)
            break
        os.kill(process, signal.SIGCONT)
        delay_s /= 2
    os.kill(int(pid.read_text(encoding="utf-8")), signal.SIGKILL)


def stop(process):
    """Stop a process, and wait until it is."""
    os.kill(process, signal.SIGSTOP)
    state = Path(f"/proc/{process}/stat")
    while state.read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "TZ":
        time.sleep(0.001)


@pytest.mark.slow
@pytest.mark.parametrize("how", [(), ("ASYNC",)])
def test_a_job_that_is_killed_20_times_continues_bit_for_bit(forks, tmp_path, how):
    folder, draw, hits, before = tmp_path / "a", random.Random(str(how)), [], 0
    assert run(forks, folder, 2, *how).returncode == 0
    for number in range(KILLS):
        (folder / "pid").unlink()
        killer = threading.Thread(target=kill, args=(folder, 2 + number % 3, draw.random() * 0.005, hits))
        killer.start()
        done = run(forks, folder, 10_000, *how)
        killer.join()
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert losses(done.stdout)[1] == [before or 2]
        before = whole(folder)
    assert len(set(hits)) == KILLS, "a kill did not fall into the writing of a checkpoint"
    found, begins = losses(run(forks, folder, before + 2).stdout)
    assert begins == [before]
    wanted, _ = losses(run(forks, tmp_path / "unbroken", before + 2).stdout)
    assert found == {step: wanted[step] for step in (before, before + 1)}


@pytest.mark.slow
def test_a_disk_that_is_full_is_named_and_the_last_checkpoint_remains(tmp_path):
    """A file system in memory of 200 KB, mounted in a namespace of its own."""
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    script = f'mount -t tmpfs -o size=200k none {disk} || exit 9; "$@"; status=$?; cp -r {disk} {copy}; exit $status'
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh", sys.executable, str(SCRIPT),
         str(disk), "10000", "ALL"],
        env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert f"RequestError: no space left on the disk of '{disk}' for the checkpoint 'step-" in done.stderr
    assert whole(copy) == max(losses(done.stdout)[0])
    assert not list(copy.glob(".partial-*"))
