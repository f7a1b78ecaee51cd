"""What compiling stages makes of a step.

    python benchmarks/runtime/compiled_stages.py [--steps N] [--rounds N] [--record FILE]

Two stages on two threads, 1F1B, 4 microbatches, float32, cut at equal numbers of operators; of a GPT with biases,
dropout left out, and of a model whose work is mostly element by element. In one run, taking turns: stages as they are,
and compiled. A turn's time is the median over its steps; what is reported is the median over turns, and the median over
turns of the ratio. Building both is timed once, whatever Inductor has on disk.
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

MICROBATCHES, ROWS, LENGTH, LAYERS, VOCABULARY = 4, 8, 128, 4, 512
Block = Callable[[int], nn.Module]
Batch = tuple[torch.Tensor, torch.Tensor]


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


def pipelines(block: Block, width: int) -> tuple[list[panpipe.Pipeline], list[float], Batch]:
    """The same plan, plain and compiled; the seconds to build each; and a batch."""
    batch = gpt.data(ROWS, LENGTH, VOCABULARY)
    piece = tuple(tensor[: ROWS // MICROBATCHES] for tensor in batch)
    operators = operators_of(capture_step(gpt.stack(block, width, LAYERS, VOCABULARY), gpt.step, piece))
    sizes = {n: tensor_bytes(operators.values[p]) for p, n in operators.step.parameters.items()}
    plan = even_plan(operators.graph, find_family("1f1b").build(ScheduleProblem(2, MICROBATCHES, 1)), sizes)
    pipes, seconds = [], []
    for compile in (None, "inductor"):
        start = time.perf_counter()
        model = gpt.stack(block, width, LAYERS, VOCABULARY)
        options = {"plan": plan, "optimizer": torch.optim.AdamW, "compile": compile}
        pipes.append(panpipe.pipeline(model, gpt.step, batch, **options))
        seconds.append(time.perf_counter() - start)
    return pipes, seconds, batch


def turn(pipe: panpipe.Pipeline, batch: Batch, steps: int) -> float:
    found = []
    for _ in range(steps):
        start = time.perf_counter()
        pipe.step(batch)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def row(name: str, block: Block, width: int, steps: int, rounds: int) -> list[str]:
    pipes, seconds, batch = pipelines(block, width)
    for pipe in pipes:
        turn(pipe, batch, 2)
    turns = [[turn(pipe, batch, steps) for pipe in pipes] for _ in range(rounds)]
    plain, compiled = (1e3 * statistics.median(column) for column in zip(*turns, strict=True))
    ratio = statistics.median(after / before for before, after in turns)
    for pipe in pipes:
        pipe.close()
    compiling_s = seconds[1] - seconds[0]
    return [f"{name}, width {width}", f"{plain:.1f}", f"{compiled:.1f}", f"{ratio:.2f}", f"{compiling_s:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", help="append the result to this Markdown file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        row("GPT", functools.partial(gpt.Block, gelu=spelled_out_gelu), 256, options.steps, options.rounds),
        row("element by element", Elementwise, 512, options.steps, options.rounds),
    ]
    title = f"Stages compiled by Inductor, two threads, {options.rounds} rounds of {options.steps} steps"
    header = ("model", "plain ms", "compiled ms", "ratio", "seconds to compile")
    print_table(title, header, rows)
    if options.record:
        record(options.record, title, machine(), header, rows)


if __name__ == "__main__":
    main()
