"""The plan that a contest chooses against the best of all named schedules, for six small models under three loads.

Two gloo workers of one thread each build a pipeline for every schedule that supports the model, then, for each load
(0, 2 and 4 other processes that compute all the time), one with an automatic plan, which trains until its contest ends.
The named pipelines train in turns, step by step, and the three with the fastest steps are timed again, in turns with
the automatic one: the fastest of a dozen noisy figures is too fast by chance, so the choice and the comparison have
steps of their own. *Slower by* is the fastest step of the automatic plan ÷ that of the best schedule − 1.

    python benchmarks/runtime/contests.py [--models mlp,gpt] [--loads 0,2,4] [--turns 16] [--record FILE]
"""

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import panpipe
import torch
import torch.distributed as dist
from panpipe.benchmarks import gpt
from panpipe.benchmarks.driver import Workers, argument_parser, busy, report, seconds
from panpipe.tests.laws.zoo.vision import UNet
from torch import Tensor, nn
from torch.nn import functional as F

MICROBATCHES, LONGEST = 8, 250
"""Steps in which a contest ends, at most."""
TRIALS, BEST = 4, 3
"""Steps by which the best of the named schedules are chosen, and how many of them are timed again."""
Case = tuple[nn.Module, tuple[Tensor, Tensor]]


def images(model: nn.Module, size: int) -> Case:
    generator = torch.Generator().manual_seed(1)
    return model, (torch.randn(16, 3, size, size, generator=generator), torch.arange(16) % 10)


def mlp() -> Case:
    """Twelve equal layers."""
    layers = [layer for _ in range(12) for layer in (nn.Linear(512, 512), nn.GELU())]
    return nn.Sequential(*layers), (torch.randn(512, 512), torch.arange(512) % 512)


def two_layers() -> Case:
    """Two equal layers: any cut but the even one leaves a device idle."""
    return nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)), (torch.randn(512, 1024), torch.arange(512))


def decoder(layers: int, vocabulary: int) -> Case:
    """A GPT. Its ends are small with few words; with many the head takes as long as several layers."""
    return gpt.stack(gpt.Block, 128, layers, vocabulary), gpt.data(16, 64, vocabulary)


def convolutions() -> Case:
    """Large activations first, and many weights at the end."""
    widths = (3, 16, 32, 64, 128)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.Conv2d(b, b, 3, 2, 1), nn.ReLU()]
    return images(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)), 32)


def skips() -> Case:
    """Layers whose results are read again in the second half, in reverse order."""
    return images(nn.Sequential(UNet(), nn.AdaptiveAvgPool2d(1), nn.Flatten()), 32)


MODELS: dict[str, Callable[[], Case]] = {
    "mlp": mlp, "two layers": two_layers, "gpt": partial(decoder, 6, 256), "wide head": partial(decoder, 4, 4096),
    "convolutions": convolutions, "u-net": skips,
}  # fmt: skip


def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def pipeline(name: str, **options: Any) -> tuple[panpipe.Pipeline, Any]:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    pipe = panpipe.pipeline(
        model, step, batch, optimizer=torch.optim.AdamW, microbatches=MICROBATCHES,
        plan=panpipe.Auto(cache=False, **options), run=panpipe.Run(progress=False),
    )  # fmt: skip
    return pipe, batch


def named(name: str) -> list[panpipe.Pipeline]:
    """A pipeline for every schedule that supports the model; of equal plans only the first."""
    found: dict[str, panpipe.Pipeline] = {}
    for schedule in panpipe.schedules.families():
        try:
            pipe, _ = pipeline(name, schedule=schedule, contest=False)
        except panpipe.PanpipeError:
            continue
        if found.setdefault(pipe.plan.hash, pipe) is not pipe:
            pipe.close()
    return list(found.values())


def timed(pipes: list[panpipe.Pipeline], batch: Any, turns: int) -> dict[panpipe.Pipeline, list[float]]:
    """Seconds of some steps of each pipeline, from barrier to barrier, in turns, the shortest first."""
    times = {pipe: list[float]() for pipe in pipes}
    for turn in range(turns):
        for pipe in pipes[turn % len(pipes) :] + pipes[: turn % len(pipes)]:
            times[pipe] += seconds(lambda pipe=pipe: pipe.step(batch), 1, dist.barrier)
    return {pipe: sorted(found) for pipe, found in times.items()}


def described(pipe: panpipe.Pipeline) -> str:
    return f"{pipe.plan.schedule}, {'/'.join(str(len(stage.nodes)) for stage in pipe.plan.stages)}"


def shown(times: list[float]) -> str:
    """The fastest and the median step in ms, and the spread between the quarters."""
    quarter, median, last = statistics.quantiles(times, n=4)
    return f"{1e3 * times[0]:.1f}, {1e3 * median:.1f}, {last / quarter - 1:.0%}"


def compared(name: str, named_pipes: list[panpipe.Pipeline], turns: int) -> dict[str, Any]:
    """The contest of an automatic plan, and its steps and those of the best of other plans."""
    chosen, batch = pipeline(name)
    steps = 0
    while chosen.contest is not None and not chosen.contest.done and steps < LONGEST:
        chosen.step(batch)
        steps += 1
    actions = chosen.plan.stages, chosen.plan.device_actions
    others = [pipe for pipe in named_pipes if (pipe.plan.stages, pipe.plan.device_actions) != actions]
    first = timed(others, batch, TRIALS)
    order = sorted(range(len(others)), key=lambda number: first[others[number]][0])
    dist.broadcast(best := torch.tensor(order[:BEST]), 0)  # ranks differ by noise
    times = timed([chosen, *(others[number] for number in best.tolist())], batch, turns)
    mine = times.pop(chosen)
    found = min(times, key=lambda pipe: times[pipe][0])
    table = [repr(chosen.contest), *(f"    {1e3 * first[pipe][0]:.1f} ms: {described(pipe)}" for pipe in others)]
    row = [described(chosen), shown(mine), described(found), shown(times[found])]
    chosen.close()
    return {"row": row, "slower": mine[0] / times[found][0] - 1, "steps": steps, "contest": "\n".join(table)}


def plans(rank: int, name: str, turns: int) -> Callable[[str], Any]:
    """What a rank answers: the number of named schedules, or the contest under the load of this moment."""
    others = named(name)
    return lambda asked: len(others) if asked == "count" else compared(name, others, turns)


def main() -> None:
    """Run, print and record."""
    arguments = argument_parser(
        __doc__, models=",".join(MODELS), loads=("0,2,4", "numbers of other processes that compute"),
        turns=(16, "timed steps of each of the best plans"),
    ).parse_args()  # fmt: skip
    rows, slower = [], dict[int, list[float]]()
    for name in arguments.models.split(","):
        start = time.perf_counter()
        ranks = Workers(2, plans, name, arguments.turns)
        count = ranks.ask("count")[0]
        for processes in map(int, arguments.loads.split(",")):
            with busy(processes):
                found = ranks.ask("contest")[0]
            slower.setdefault(processes, []).append(found["slower"])
            difference = f"{found['slower']:+.1%}"
            rows.append([name, f"{processes}", *found["row"], difference, f"{count}", f"{found['steps']}"])
            print(" | ".join(rows[-1]), f"({time.perf_counter() - start:.0f} s)\n{found['contest']}", flush=True)
        ranks.close()
    every = {**slower, "all": list(itertools.chain.from_iterable(slower.values()))}
    shares = (f"{load}: {statistics.median(each):+.1%}, {max(each):+.1%}" for load, each in every.items())
    title = (
        f"automatic plan against the best schedule, in the median and at most, by other processes: {'; '.join(shares)}"
    )
    header = (
        "model", "other processes", "chosen", "fastest, median ms, spread", "best schedule",
        "fastest, median ms, spread", "slower", "plans", "steps of the contest",
    )  # fmt: skip
    report(arguments.record, title, header, rows)


if __name__ == "__main__":
    main()
