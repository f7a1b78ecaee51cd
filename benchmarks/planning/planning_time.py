"""Where the time of planning goes: for the demo's GPT-2, and for a two-layer MLP; ``scale.py`` has ``panpipe plan``.

Each run has separate processes, and plans without the cache:

- ``demo``: the demo's model and batch over two gloo workers of one thread each. Planning counts from the end of the
  capture.
- ``mlp``: a two-layer MLP over two threads of a process, from the call of ``panpipe.pipeline`` with everything imported
  that a pipeline needs, and then once more with the plan of the first run, which a cache holds.

Printed and recorded are medians over runs, and from which to which they go. Processor seconds are of rank 0, or of the
process: on a machine with other work they say more than seconds of the clock.

    python benchmarks/planning/planning_time.py [--only demo] [--runs 3] [--record FILE]
"""

import functools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import torch
import torch.multiprocessing as mp
from attrs import field, frozen
from torch import nn

from benchmarks.driver import argument_parser, rank_environment, report

PORT = 29760
CAPTURE = "capturing the step"
BOUNDS = {"demo": 4.0, "mlp": 1.5, "mlp, second run": 0.5}
"""Processor seconds after the capture."""


@frozen
class Phase:
    """A part of planning: its name, and seconds by the clock and of the processor."""

    name: str
    wall_s: float
    cpu_s: float


@frozen
class Phases:
    """Called with the progress of planning; keeps when each phase began, by the clock and the processor."""

    marks: list[tuple[str, float, float]] = field(factory=list)

    def __call__(self, phase: str, done: int = 0, total: int = 0) -> None:
        phase = general(phase)
        if not self.marks or phase != self.marks[-1][0]:
            self.marks.append((phase, time.perf_counter(), time.process_time()))

    def phases(self) -> list[Phase]:
        """Each with its time; what has none, such as the last lines, is left out."""
        ends = [*self.marks[1:], ("", time.perf_counter(), time.process_time())]
        found = [Phase(a[0], b[1] - a[1], b[2] - a[2]) for a, b in zip(self.marks, ends, strict=True)]
        return [each for each in found if not each.name.startswith("planned")]


def general(phase: str) -> str:
    """A phase without what is of one run: the plan that was found."""
    return phase.partition(":")[0]


def demo_worker(rank: int, wire: Any) -> None:
    """One of the two workers; rank 0 sends the phases."""
    import panpipe
    import train_gpt2 as demo

    os.environ.update(rank_environment(rank, PORT))
    torch.set_num_threads(1)
    batch, phases = demo.batches(demo.standard_library_text(), 1)[0], Phases()
    with panpipe.pipeline(
        demo.make_model(), demo.step, batch, optimizer=functools.partial(torch.optim.AdamW, lr=5e-4),
        microbatches=demo.MICROBATCHES, plan=panpipe.Auto(cache=False), run=panpipe.Run(progress=phases),
    ):  # fmt: skip
        if rank == 0:
            wire.send(phases.phases())


def mlp_worker(_: int, wire: Any) -> None:
    """The only process; sends the phases of two runs."""
    import panpipe
    import panpipe.runtimes.build

    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    batch = {"x": torch.randn(32, 64), "y": torch.randint(0, 10, (32,))}

    def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"])

    with tempfile.TemporaryDirectory() as cache:
        os.environ["PANPIPE_CACHE"] = cache
        for _run in range(2):
            phases = Phases()
            panpipe.pipeline(
                model, step, batch, optimizer=functools.partial(torch.optim.SGD, lr=0.1), microbatches=4,
                run=panpipe.Run(progress=phases),
            ).close()  # fmt: skip
            wire.send(phases.phases())


def in_processes(worker: Callable[..., None], count: int, answers: int) -> list[Any]:
    """What the first of these processes sends."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    processes = [context.Process(target=worker, args=(rank, theirs), daemon=True) for rank in range(count)]
    for process in processes:
        process.start()
    theirs.close()  # so that reading ends when the workers have stopped
    found = [ours.recv() for _ in range(answers)]
    for process in processes:
        process.join()
    return found


def run(name: str) -> dict[str, list[Phase]]:
    """One run: what was planned → its phases."""
    if name == "demo":
        (phases,) = in_processes(demo_worker, 2, 1)
        return {name: phases}
    first, second = in_processes(mlp_worker, 1, 2)
    return {name: first, f"{name}, second run": second}


def total(name: str, phases: Sequence[Phase]) -> float:
    """The seconds that the bound is for."""
    return sum(each.cpu_s for each in phases if each.name != CAPTURE)


def spread(values: Sequence[float]) -> str:
    """Median, and from which to which they go."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def rows(name: str, runs: Sequence[Sequence[Phase]]) -> list[tuple[str, ...]]:
    """A row a phase, and one for all together."""
    names = list(dict.fromkeys(each.name for phases in runs for each in phases))
    found = []
    for phase in names:
        same = [[each for each in phases if each.name == phase] for phases in runs]
        wall, cpu = ([sum(getattr(each, kind) for each in one) for one in same if one] for kind in ("wall_s", "cpu_s"))
        found.append((name, phase, spread(wall), spread(cpu), f"{len(wall)} of {len(runs)}"))
    whole = [total(name, phases) for phases in runs]
    return [*found, (name, f"all, bound {BOUNDS[name]:g} s", spread(whole), "", str(len(runs)))]


HEADER = ("planned", "phase", "seconds", "of the processor", "runs")


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--only", choices=("demo", "mlp"), help="one of them")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.runs < 1:
        parser.error(f"{arguments.runs} runs: give at least 1")
    found: dict[str, list[list[Phase]]] = {}
    for name in [arguments.only] if arguments.only else ["demo", "mlp"]:
        for _ in range(arguments.runs):
            for what, phases in run(name).items():
                found.setdefault(what, []).append(phases)
    table = [row for name, runs in found.items() for row in rows(name, runs)]
    report(arguments.record, "Where the time of planning goes", HEADER, table)


if __name__ == "__main__":
    main()
