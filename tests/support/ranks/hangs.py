"""Ranks that hang, each in its own way, and what the others do meanwhile. `ranks` runs them as the job ``hanging``."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from panpipe.runtimes.pipeline import Pipeline
from panpipe.runtimes.programs.stage_run import StageRun

from . import strangers

STEPS = 6
LONG_S = 600


def stop_for(seconds: float) -> None:
    """Stop this process as SIGSTOP does; a child continues it."""
    subprocess.Popen(
        ["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"], start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.kill(os.getpid(), signal.SIGSTOP)


def stopped(pipe: Pipeline, batch: Any) -> None:
    """Stopped between steps."""
    stop_for(float(os.environ["STOPPED_S"]))
    pipe.step(batch)


def stopped_in_action(pipe: Pipeline, batch: Any) -> None:
    """Stopped inside an action."""
    _in_forward(lambda: stop_for(float(os.environ["STOPPED_S"])))
    pipe.step(batch)


def sleeps(pipe: Pipeline, batch: Any) -> None:
    """Asleep between steps."""
    time.sleep(LONG_S)


def loops(pipe: Pipeline, batch: Any) -> None:
    """In an endless loop of the user's code."""
    endless_loop()


def endless_loop() -> None:
    """What it says."""
    while True:
        torch.ones(2).sum()


def loops_in_forward(pipe: Pipeline, batch: Any) -> None:
    """In an endless loop inside an action."""
    _in_forward(endless_loop)
    pipe.step(batch)


_inside: list[Callable[[], None]] = []


def _in_forward(what: Callable[[], None]) -> None:
    _inside.append(what)


def patch_forwards() -> None:
    """Make the forwards of stages hang when asked to; before the pipeline is built, which binds them."""
    forward = StageRun.forward

    def call(*given: Any, **named: Any) -> Any:
        for what in _inside:
            what()
        return forward(*given, **named)

    StageRun.forward = call  # type: ignore[method-assign]


def evaluates(pipe: Pipeline, batch: Any) -> None:
    """Evaluates."""
    pipe.evaluate(batch)
    time.sleep(LONG_S)


def checkpoints(pipe: Pipeline, batch: Any) -> None:
    """Writes a checkpoint."""
    pipe.checkpoint(Path(sys.argv[2], "apart"))


def saves(pipe: Pipeline, batch: Any) -> None:
    """Writes the weights."""
    pipe.save(Path(sys.argv[2], "weights"))


def steps(pipe: Pipeline, batch: Any) -> None:
    """Steps on, as all ranks do."""
    pipe.step(batch)


def ends(pipe: Pipeline, batch: Any) -> None:
    """Has fewer batches, and ends."""
    raise StopIteration


def ends_and_sleeps(pipe: Pipeline, batch: Any) -> None:
    """Has fewer batches, and does something else, until the others have ended."""
    pipe.close()
    time.sleep(20.0)
    raise StopIteration


def raises_and_catches(pipe: Pipeline, batch: Any) -> None:
    """Raises before it communicates, and goes on with the next batch."""
    with suppress(Exception):
        pipe.step({**batch, "another": torch.ones(8)})
    time.sleep(LONG_S)


class _Stuck(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        time.sleep(LONG_S)
        return index


def loads(pipe: Pipeline, batch: Any) -> None:
    """Waits for a DataLoader whose worker is stuck."""
    next(iter(torch.utils.data.DataLoader(_Stuck(), num_workers=1)))


def pauses(pipe: Pipeline, batch: Any) -> None:
    """Does something else for longer than the limit, as all ranks do, once."""
    if pipe.metrics.steps == 2:
        time.sleep(3 * float(os.environ["PANPIPE_TIMEOUT_S"]))
    pipe.step(batch)


def slow_actions(pipe: Pipeline, batch: Any) -> None:
    """Computes a third of the limit in each forward, in one step."""
    _in_forward(lambda: time.sleep(float(os.environ["PANPIPE_TIMEOUT_S"]) / 3))
    pipe.step(batch)
    _inside.clear()


def visits(pipe: Pipeline, batch: Any) -> None:
    """Is visited by strangers, at every port of both ranks, and trains on."""
    pids = [int(Path(sys.argv[2], f"{rank}.pid").read_text(encoding="utf-8")) for rank in (0, 1)]
    ports = sorted({port for pid in pids for port in strangers.listening(pid)})
    assert ports
    kept = strangers.visit(ports)
    assert kept
    pipe.step(batch)
    pipe.evaluate(batch)


def is_visited(pipe: Pipeline, batch: Any) -> None:
    """The same on the other rank, without strangers of its own."""
    pipe.step(batch)
    pipe.evaluate(batch)


def signals(pipe: Pipeline, batch: Any) -> None:
    """Asks the other rank where every rank is, while that waits."""
    if pipe.metrics.steps == 2:
        time.sleep(2)
        os.kill(int(Path(sys.argv[2], "0.pid").read_text(encoding="utf-8")), signal.SIGUSR1)
        time.sleep(4)
    pipe.step(batch)


def _numbers() -> Iterator[int]:
    yield from range(STEPS)


def run(pipe: Pipeline, batch: Any, rank: int) -> None:
    """Train, and at step 2 do what the environment says: ``HANG`` on rank ``VICTIM``, ``MEANWHILE`` on the others."""
    Path(sys.argv[2], f"{rank}.pid").write_text(str(os.getpid()), encoding="utf-8")
    victim, other = globals()[os.environ["HANG"]], globals()[os.environ.get("MEANWHILE", "steps")]
    for number in _numbers():
        if number != 2:
            pipe.step(batch)
            continue
        try:
            (victim if rank == int(os.environ["VICTIM"]) else other)(pipe, batch)
        except StopIteration:
            return
