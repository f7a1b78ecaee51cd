"""What the executor costs for each compute action: very small stages, 64 microbatches, 1F1B on two gloo ranks.

In one run, taking turns: panpipe, and ``torch.distributed.pipelining``. A turn's time is the median over its steps,
barrier to barrier, divided by a rank's compute actions; what is reported is the median over turns.

    python benchmarks/runtime/action_overhead.py [--steps 25] [--rounds 15] [--record FILE]
"""

import json
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from panpipe.benchmarks.driver import Workers, argument_parser, report, seconds
from torch import nn

MICROBATCHES = 64
ACTIONS = 2 * MICROBATCHES
WARM_UP = 3
"""Steps of a turn that do not count."""


def step_function(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).pow(2).mean()


def panpipe_step(batch: torch.Tensor) -> Callable[[], object]:
    """A step of a pipeline whose first stage is one Linear, and whose second is the other with the loss."""
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
    pipe = panpipe.pipeline(model, step_function, batch, optimizer=None, plan=plan)
    return lambda: pipe.step(batch)


def peer_step(batch: torch.Tensor, rank: int) -> Callable[[], object]:
    """The same step by ``torch.distributed.pipelining``."""
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


def contenders(rank: int, steps: int) -> Callable[[str], float]:
    """What a rank answers: µs per compute action in a turn of a contender."""
    batch = torch.randn(MICROBATCHES, 8, generator=torch.Generator().manual_seed(1))
    runs = {"panpipe": panpipe_step(batch), "torch 1F1B": peer_step(batch, rank)}
    return lambda name: 1e6 / ACTIONS * statistics.median(seconds(runs[name], steps, dist.barrier)[WARM_UP:])


def main() -> None:
    arguments = argument_parser(__doc__, steps=25, rounds=15).parse_args()
    ranks = Workers(2, contenders, arguments.steps)
    times: dict[str, list[float]] = {"panpipe": [], "torch 1F1B": []}
    for _ in range(arguments.rounds):
        for name, found in times.items():
            found.append(ranks.ask(name)[0])
    ranks.close()
    medians = {name: round(statistics.median(found), 1) for name, found in times.items()}
    print(json.dumps(medians))
    title = "Overhead per compute action, µs (Linear 8×8 stages, 64 microbatches, two gloo ranks)"
    rows = [(name, f"{value}") for name, value in medians.items()]
    report(arguments.record, title, ("runner", "µs per compute action"), rows)


if __name__ == "__main__":
    main()
