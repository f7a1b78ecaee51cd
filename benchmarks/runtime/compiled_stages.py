"""What compiling makes of a step: of a pipeline's stages, and of the whole step in one process.

    python benchmarks/runtime/compiled_stages.py [--steps N] [--rounds N] [--model NAME] [--record FILE]

Two stages on two threads, 1F1B, float32, cut at equal numbers of operators, against one process that runs the same
microbatches one after another, eager and with ``torch.compile`` of the user's step. Models: the benchmark model, a GPT
with biases and a GELU written out, and one whose work is mostly element by element. In one run, taking turns. A turn's
time is the median over its steps; reported is the median over turns, and the median over turns of the ratios:

    speed-up       eager in one process ÷ pipeline
    gain           plain ÷ compiled, of one process and of the pipeline
    relative gain  (one process compiled ÷ speed-up) ÷ pipeline compiled: at least 1 if compiling gains a pipeline as
                   much as it gains one process

Each by the time on the clock, and by the CPU seconds of all threads, which other programs on the machine change less.
"""

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import panpipe
import torch
from attrs import frozen
from panpipe.answers.output import print_table
from panpipe.core.capture.export.operators import operators_of, tensor_bytes
from panpipe.core.capture.export.step import capture_step
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family
from panpipe.core.search import even_plan
from torch import nn
from torch.nn import functional

from benchmarks import gpt
from benchmarks.recording import machine, record

ROWS, LENGTH, LAYERS, VOCABULARY = 8, 128, 4, 512
Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[Batch], object]


def spelled_out_gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU as GPT-2 has it, so that there is something to fuse."""
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x.pow(3))))


class Elementwise(nn.Module):
    """A gated recurrence without products but one: norms, gates and soft caps written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.gate, self.shift = (nn.Parameter(torch.ones(width)) for _ in range(3))
        self.mix = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        y = 30 * torch.tanh(y / 30) * torch.sigmoid(self.gate * y) + self.shift
        y = y / (1 + y.abs()) + functional.softplus(y) * torch.exp(-y.pow(2))
        return x + self.mix(y)


@frozen
class Case:
    """A model and its batches.

    Args:
        make: creates the model, with the same values at every call.
        batch: whole.
        microbatches: that it is cut into.
    """

    make: Callable[[], nn.Module]
    batch: Batch
    microbatches: int

    def pieces(self) -> list[Batch]:
        """The microbatches."""
        inputs, targets = (tensor.chunk(self.microbatches) for tensor in self.batch)
        return list(zip(inputs, targets, strict=True))


def stack_of(block: Callable[[int], nn.Module], width: int) -> Case:
    return Case(lambda: gpt.stack(block, width, LAYERS, VOCABULARY), gpt.data(ROWS, LENGTH, VOCABULARY), 4)


CASES = {
    "benchmark": Case(gpt.make, gpt.data(), gpt.MICROBATCHES),
    "gpt": stack_of(functools.partial(gpt.Block, gelu=spelled_out_gelu), 256),
    "elementwise": stack_of(Elementwise, 512),
}


def one_process(case: Case, compiled: bool) -> Step:
    """A step in one process: the microbatches one after another, and an update."""
    model = case.make()
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of = torch.compile(gpt.step) if compiled else gpt.step

    def run(_batch: Batch) -> None:
        optimizer.zero_grad()
        for piece in case.pieces():
            (loss_of(model, piece) / case.microbatches).backward()
        optimizer.step()

    return run


def pipelines(case: Case) -> list[panpipe.Pipeline]:
    """The same plan, plain and compiled."""
    operators = operators_of(capture_step(case.make(), gpt.step, case.pieces()[0]))
    sizes = {n: tensor_bytes(operators.values[p]) for p, n in operators.step.parameters.items()}
    plan = even_plan(operators.graph, find_family("1f1b").build(ScheduleProblem(2, case.microbatches, 1)), sizes)
    options = {"plan": plan, "optimizer": torch.optim.AdamW}
    return [panpipe.pipeline(case.make(), gpt.step, case.batch, compile=how, **options) for how in (None, "inductor")]


CLOCKS = {"clock": time.perf_counter, "CPU": time.process_time}


def turn(step: Step, batch: Batch, steps: int) -> dict[str, float]:
    """The median seconds of a step, by each clock."""
    found: dict[str, list[float]] = {name: [] for name in CLOCKS}
    for _ in range(steps):
        start = {name: now() for name, now in CLOCKS.items()}
        step(batch)
        for name, now in CLOCKS.items():
            found[name].append(now() - start[name])
    return {name: statistics.median(each) for name, each in found.items()}


def rows_of(name: str, case: Case, steps: int, rounds: int) -> list[list[str]]:
    pipes = pipelines(case)
    runners = [one_process(case, False), one_process(case, True), *(pipe.step for pipe in pipes)]
    for runner in runners:
        turn(runner, case.batch, 2)
    turns = [[turn(runner, case.batch, steps) for runner in runners] for _ in range(rounds)]
    for pipe in pipes:
        pipe.close()
    return [row(name, clock, [[each[clock] for each in one] for one in turns]) for clock in CLOCKS]


def row(name: str, clock: str, turns: list[list[float]]) -> list[str]:
    times = [f"{1e3 * statistics.median(column):.1f}" for column in zip(*turns, strict=True)]

    def ratio(of: Callable[[float, float, float, float], float]) -> str:
        return f"{statistics.median(of(*each) for each in turns):.2f}"

    ratios = [
        ratio(lambda eager, whole, plain, compiled: eager / plain),
        ratio(lambda eager, whole, plain, compiled: eager / whole),
        ratio(lambda eager, whole, plain, compiled: plain / compiled),
        ratio(lambda eager, whole, plain, compiled: whole / (eager / plain) / compiled),
    ]
    return [name, clock, *times, *ratios]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", choices=CASES, action="append", help="by default all")
    parser.add_argument("--record", help="append the result to this Markdown file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        each for name in options.model or CASES for each in rows_of(name, CASES[name], options.steps, options.rounds)
    ]
    title = f"Compiled by Inductor, ms a step, {options.rounds} rounds of {options.steps} steps"
    header = (
        "model", "by", "one process", "compiled", "pipeline", "compiled stages", "speed-up", "gain of one process",
        "gain of the pipeline", "relative gain",
    )  # fmt: skip
    print_table(title, header, rows)
    if options.record:
        record(options.record, title, machine(), header, rows)


if __name__ == "__main__":
    main()
