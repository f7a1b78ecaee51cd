"""Ranks that train with ``replan="auto"`` while the device of rank 1 becomes slower: ``torchrun … drifting.py FOLDER``.

Programs of both ranks sleep for each of their operators, much longer than they compute, so that times do not depend on
how busy the machine is. With SLOW in the environment, rank 1 sleeps three times as long from that step on. What a rank
found is in FOLDER/RANK.json.
"""

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
import panpipe
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.plan.plan import Plan
from panpipe.runtimes.planning import measurements
from panpipe.runtimes.programs.stage_run import StageRun

from tests.support.cuts import even_plan
from tests.support.training import state_bits

WIDTH, ROWS, MICROBATCHES, STEPS = 256, 256, 4, 90
EACH_S = 1e-3
"""Seconds that a program sleeps for each operator."""
PROGRAMS = ("forward", "backward", "backward_input", "backward_weight")


class Layers(nn.Module):
    """Equal layers with BatchNorm and dropout, so that buffers and random numbers move, too."""

    def __init__(self) -> None:
        super().__init__()
        parts = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.1)]
        self.layers = nn.ModuleList(nn.Sequential(*(type(p)(*_sizes(p)) for p in parts)) for _ in range(8))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _sizes(part: nn.Module) -> tuple[Any, ...]:
    if isinstance(part, nn.Linear):
        return part.in_features, part.out_features
    return (part.num_features,) if isinstance(part, nn.BatchNorm1d) else (0.1,) if isinstance(part, nn.Dropout) else ()


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def sleep_in_programs(pipes: list[panpipe.Pipeline], active: list[bool]) -> None:
    """Make the programs of this process sleep for each of their operators, three times as long while ``active[0]``."""
    for name in PROGRAMS:
        program = getattr(StageRun, name)

        def slowed(self: StageRun, *arguments: Any, _program: Any = program) -> Any:
            found = _program(self, *arguments)
            if pipes:
                time.sleep((3 if active[0] else 1) * EACH_S * len(pipes[0].plan.stages[self.index].nodes))
            return found

        setattr(StageRun, name, slowed)


def sleep_in_profiles(active: list[bool]) -> None:
    """Make the operators of a profile take as long as in programs."""
    profile = measurements.profile_operators

    def slowed(*arguments: Any, **options: Any) -> Any:
        graph, each_s = profile(*arguments, **options), (3 if active[0] else 1) * EACH_S
        nodes = (evolve(n, forward_s=each_s, backward_input_s=each_s, backward_weight_s=0.0) for n in graph.nodes)
        return evolve(graph, nodes=tuple(nodes))

    measurements.profile_operators = slowed


class Lines(logging.Handler):
    """Keeps the lines of the logger ``panpipe``, with the step."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.step, record.getMessage()))


def main() -> None:
    torch.set_num_threads(1)
    rank, slow_at = int(os.environ["RANK"]), int(os.environ.get("SLOW", "-1"))
    lines, active = Lines(), [False]
    pipes: list[panpipe.Pipeline] = []
    logging.getLogger("panpipe").addHandler(lines)
    sleep_in_programs(pipes, active)
    sleep_in_profiles(active)
    torch.manual_seed(0)
    model = Layers()
    batch = {"x": torch.randn(ROWS, WIDTH), "y": torch.randint(4, (ROWS,))}
    piece = {name: value[: ROWS // MICROBATCHES] for name, value in batch.items()}
    plan: Plan = even_plan(operators_of(capture_step(model, step, piece)), 2, MICROBATCHES)
    pipe = panpipe.pipeline(
        model, step, batch, optimizer=torch.optim.AdamW, plan=plan, run=panpipe.Run(replan="auto", progress=False),
    )  # fmt: skip
    pipes.append(pipe)
    average = panpipe.weights.ema(pipe, 0.9)
    times, losses, sizes = [], [], []
    for index in range(STEPS):
        active[0] = rank == 1 and index >= slow_at >= 0
        start = time.perf_counter()
        losses.append(pipe.step(batch).item().hex())
        times.append(time.perf_counter() - start)
        sizes.append([sum(len(s.nodes) for s in pipe.plan.stages_on(device)) for device in range(2)])
    bits = state_bits(pipe, average.tensors)
    found = {"losses": losses, "times": times, "sizes": sizes, "bits": bits, "lines": lines.lines}
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    pipe.close()


if __name__ == "__main__":
    main()
