"""What the executor costs for each compute action: very small stages, 64 microbatches, 1F1B on two gloo ranks.

In one run, taking turns: panpipe, and ``torch.distributed.pipelining``. A turn's time is the median over its steps,
barrier to barrier, divided by a rank's compute actions; what is reported is the median over turns.

    python benchmarks/runtime/action_overhead.py [--steps 25] [--rounds 15] [--record FILE]
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.driver import Workers, argument_parser, report

MICROBATCHES = 64
ACTIONS = 2 * MICROBATCHES


def step_function(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).pow(2).mean()


def timed(steps: int, run: Any) -> float:
    """µs per compute action: the median of some steps."""
    times = []
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        run()
        dist.barrier()
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:]) / ACTIONS * 1e6


def panpipe_step(batch: torch.Tensor) -> Any:
    """A pipeline whose first stage is one Linear, and whose second is the other with the loss."""
    import panpipe
    from panpipe.core.capture.export.operators import operators_of
    from panpipe.core.capture.export.step import capture_step
    from panpipe.core.schedules.problem import ScheduleProblem
    from panpipe.core.schedules.registry import find_family
    from panpipe.core.search.problem.assemble import assemble

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    graph = operators_of(capture_step(model, step_function, batch[:1])).graph
    names = [node.name for node in graph.nodes]
    schedule = find_family("1f1b").build(ScheduleProblem(2, MICROBATCHES))
    plan = assemble(graph, [names[:1], names[1:]], schedule)
    return panpipe.pipeline(model, step_function, batch, optimizer=None, plan=plan)


def peer(batch: torch.Tensor, rank: int) -> Any:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stage = PipelineStage(nn.Linear(8, 8), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=lambda out, target: out.pow(2).mean())

    def run() -> None:
        stage.submod.zero_grad(set_to_none=True)
        if rank == 0:
            schedule.step(batch, return_outputs=False)
        else:
            schedule.step(target=batch, losses=[], return_outputs=False)

    return run


def contenders(rank: int, steps: int, rounds: int) -> Callable[[str], dict[str, float]]:
    """What a rank answers: the median of the rounds of each contender, in turns."""
    batch = torch.randn(MICROBATCHES, 8, generator=torch.Generator().manual_seed(1))
    pipe, torch_step = panpipe_step(batch), peer(batch, rank)

    def measured(asked: str) -> dict[str, float]:
        times: dict[str, list[float]] = {"panpipe": [], "torch 1F1B": []}
        for _ in range(rounds):
            times["panpipe"].append(timed(steps, lambda: pipe.step(batch)))
            times["torch 1F1B"].append(timed(steps, torch_step))
        return {name: statistics.median(series) for name, series in times.items()}

    return measured


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    ranks = Workers(2, contenders, arguments.steps, arguments.rounds)
    result = ranks.ask("times")[0]
    ranks.close()
    print(json.dumps({name: round(value, 1) for name, value in result.items()}))
    if arguments.record:
        rows = [(name, f"{value:.1f}") for name, value in result.items()]
        title = "Overhead per compute action, µs (Linear 8×8 stages, 64 microbatches, two gloo ranks)"
        report(arguments.record, title, ("runner", "µs per compute action"), rows)


if __name__ == "__main__":
    main()
