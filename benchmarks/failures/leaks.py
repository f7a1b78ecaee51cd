"""Trains many steps, and builds and closes many pipelines: neither memory, threads nor file handles may grow.

    python benchmarks/failures/leaks.py [--steps 5000] [--pipelines 200] [--ranks 2]

Without ``--ranks`` the devices of the pipelines are threads of this process. Ranks are forks of it, and each reports
its own numbers. Every hundredth step is followed by an evaluation and a checkpoint in the background. Memory is what
the process holds after a garbage collection, without pages that it shares with files.
"""

import gc
import os
import shutil
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import panpipe
import torch
from attrs import frozen
from panpipe.runtimes.devices.heap import give_back_freed_memory
from torch import nn

from benchmarks.driver import argument_parser, fork_ranks, run, statuses

PARTS = 10
"""Numbers are printed this many times, after equal parts of the work."""


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The training step."""
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


BATCH = {"x": torch.ones(8, 16), "y": torch.zeros(8, 16)}


@frozen
class Held:
    """What a process holds.

    Args:
        kib: of memory.
        threads, files: how many.
    """

    kib: int
    threads: int
    files: int

    @classmethod
    def now(cls) -> "Held":
        """At this moment."""
        gc.collect()
        give_back_freed_memory()
        with open("/proc/self/smaps_rollup", encoding="ascii") as file:
            anonymous = next(line for line in file if line.startswith("Anonymous:"))
        return cls(int(anonymous.split()[1]), len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")))


def built(folder: Path) -> Any:
    """A pipeline of two stages; all but the first have the plan of the first."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    plan = folder / "plan.json"
    pipe = panpipe.pipeline(
        model, step, BATCH, optimizer=torch.optim.Adam, microbatches=2, mesh="pp=2",
        plan=plan if plan.exists() else panpipe.Auto(schedule="1f1b", max_chunks=1),
        run=panpipe.Run(progress=False),
    )  # fmt: skip
    return pipe


def steps(folder: Path, count: int) -> Iterator[None]:
    """Train with one pipeline."""
    with built(folder) as pipe:
        for number in range(1, count + 1):
            pipe.step(BATCH)
            if number % 100 == 0:
                pipe.evaluate(BATCH)
                pipe.checkpoint(folder / f"step-{number}", wait=False, keep=1)
            yield


def pipelines(folder: Path, count: int) -> Iterator[None]:
    """Build pipelines, train each for a step, and close it."""
    for _ in range(count):
        with built(folder) as pipe:
            pipe.step(BATCH)
        yield


def measure(folder: Path, given: Namespace, rank: int | None = None) -> None:
    """Run both, and print what this process holds."""
    with built(folder) as first:
        if not rank:
            (folder / "plan.json").write_text(panpipe.plan_json(first.plan), encoding="utf-8")
        first.step(BATCH)
    for name, work, count in (("steps", steps, given.steps), ("pipelines", pipelines, given.pipelines)):
        if not count:
            continue
        begun = time.monotonic()
        for done, _ in enumerate(work(folder, count), 1):
            if done % max(1, count // PARTS) == 0:
                held, took_s = Held.now(), time.monotonic() - begun
                numbers = f"{done} | {held.kib / 1024:.1f} | {held.threads} | {held.files} | {took_s:.0f}"
                print(f"| {'threads' if rank is None else rank} | {name} | {numbers} |", flush=True)


def main() -> None:
    """Measure, in this process or in its forks."""
    parser = argument_parser(__doc__)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--pipelines", type=int, default=200)
    parser.add_argument("--ranks", type=int, choices=(0, 2), default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| rank | of | done | MiB | threads | files | s |\n|---|---|---|---|---|---|---|", flush=True)
    folder = Path(tempfile.mkdtemp())
    if not given.ranks:
        measure(folder, given)
        shutil.rmtree(folder)
        return
    assert threading.active_count() == 1
    found = statuses(fork_ranks(given.ranks, partial(measure, folder, given)))
    shutil.rmtree(folder)
    sys.exit(max(map(abs, found)))


if __name__ == "__main__":
    run(main)
