"""What the parts of the GPU benchmark train, and how they time it."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import panpipe
import torch
from attrs import frozen
from panpipe.core.capture.export.operators import Operators, operators_of, tensor_bytes
from panpipe.core.capture.export.step import capture_step
from panpipe.core.plan.plan import Plan
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family
from panpipe.core.search import even_plan
from torch import nn

from benchmarks import gpt

Found = dict[str, Any]


@frozen
class Size:
    """What is trained, and where.

    Args:
        device: the torch device that all stages share.
        width, layers, vocabulary, length: of the GPT.
        rows, microbatches: of a batch.
        steps, warm_up: timed steps, and steps before them.
        stages: numbers of stages.
        widths: the three models whose predictions are compared with measurements.
        memory_bytes: what the part ``memory`` may use of the GPU.
        short_of_memory: the changes with which the activations exceed that.
    """

    device: str = "cuda:0"
    width: int = 2048
    layers: int = 8
    vocabulary: int = 16384
    length: int = 1024
    rows: int = 32
    microbatches: int = 8
    steps: int = 5
    warm_up: int = 3
    stages: tuple[int, ...] = (1, 2, 4)
    widths: tuple[int, int, int] = (1024, 2048, 3072)
    memory_bytes: int = 28 << 30
    short_of_memory: Mapping[str, Any] = {
        "width": 4096, "vocabulary": 4096, "rows": 64, "microbatches": 4, "steps": 2, "warm_up": 1, "stages": (8,)
    }  # fmt: skip

    @property
    def where(self) -> torch.device:
        return torch.device(self.device)


TOY = Size(
    "cpu", 16, 2, 32, 8, 4, 2, 1, 1, (1, 2), widths=(16, 32, 48),
    short_of_memory={"width": 256, "layers": 4, "length": 256, "rows": 8, "stages": (4,)},
)  # fmt: skip


def step_in_bfloat16(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The training step, in bfloat16 by autocast."""
    with torch.autocast(batch[0].device.type, torch.bfloat16):
        return gpt.step(model, batch)


def model_of(size: Size) -> nn.Module:
    with size.where:  # a host needs seconds for a billion random numbers
        return gpt.stack(gpt.Block, size.width, size.layers, size.vocabulary)


def batch_of(size: Size, where: torch.device | str = "cpu") -> tuple[torch.Tensor, ...]:
    return tuple(tensor.to(where) for tensor in gpt.data(size.rows, size.length, size.vocabulary))


def synchronize(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def operators_on(size: Size, model: nn.Module, step: Any, batch: Any) -> Operators:
    """The step of a microbatch, captured."""
    piece = tuple(tensor[: len(tensor) // size.microbatches].to(size.where) for tensor in batch)
    return operators_of(capture_step(model, step, piece, device=size.where.type))


def plan_of(operators: Operators, microbatches: int, devices: int, chunks: int = 1) -> Plan:
    """A plan with as many operators in each stage, made without measurements."""
    sizes = {n: tensor_bytes(operators.values[p]) for p, n in operators.step.parameters.items()}
    problem = ScheduleProblem(devices, microbatches, chunks)
    return even_plan(operators.graph, find_family("1f1b" if chunks == 1 else "interleaved-1f1b").build(problem), sizes)


def pipeline_of(
    size: Size, plan: Plan | int, model: nn.Module, step: Any, batch: Any, optimizer: Any = torch.optim.AdamW,
    memory: panpipe.Memory | None = None, **options: Any,
) -> panpipe.Pipeline:  # fmt: skip
    """A pipeline whose devices share the torch device, by a plan, or by an even one with this many stages."""
    if isinstance(plan, int):
        plan = plan_of(operators_on(size, model, step, batch), size.microbatches, plan)
    names = ",".join([size.device] * len(plan.device_actions))
    return panpipe.pipeline(
        model, step, batch, plan=plan, optimizer=optimizer, devices=names, memory=memory,
        run=panpipe.Run(share_devices=True, progress=False, **options),
    )  # fmt: skip


def eager(size: Size, model: nn.Module, step: Any, batch: Any, optimizer: Any = torch.optim.AdamW) -> Found:
    """Plain PyTorch on the same microbatches."""
    here = [tensor.to(size.where).chunk(size.microbatches) for tensor in batch]
    update = optimizer(model.parameters())

    def run() -> torch.Tensor:
        update.zero_grad()
        total = torch.zeros((), device=size.where)
        for piece in zip(*here, strict=True):
            loss = step(model, piece) / size.microbatches
            loss.backward()
            total += loss.detach()
        update.step()
        return total

    return measured(size, run)


def measured(size: Size, run: Callable[[], torch.Tensor], compared: Found | None = None) -> Found:
    """Times, peak and losses of steps.

    Args:
        size: has their number, and the tokens of each.
        run: a step, which returns its loss.
        compared: steps that have to have equal losses.
    """
    if size.where.type == "cuda":
        torch.cuda.reset_peak_memory_stats(size.where)
    losses: list[torch.Tensor] = []
    seconds = seconds_of(lambda: losses.append(run()), size)
    median = statistics.median(seconds)
    found: Found = {
        "median_s": median, "least_s": min(seconds), "most_s": max(seconds),
        "tokens_per_s": size.rows * size.length / median, "peak_bytes": peak_bytes(size),
        "losses": [loss.item() for loss in losses],
    }  # fmt: skip
    if compared is not None and "losses" in compared:
        one, other = (torch.tensor(each["losses"], dtype=torch.float64) for each in (found, compared))
        found["losses_apart"] = (one / other - 1).abs().max().item()  # NaN if a loss is
        found["slower"] = median / compared["median_s"] - 1
    return found


def seconds_of(run: Callable[[], object], size: Size, steps: int | None = None) -> list[float]:
    """Seconds of each timed step."""
    found = []
    for index in range(size.warm_up + (steps or size.steps)):
        synchronize(size.where)
        start = time.perf_counter()
        run()
        synchronize(size.where)
        if index >= size.warm_up:
            found.append(time.perf_counter() - start)
    return found


def share_during(spans: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    """The share of the time of some spans in which there is one of the others."""
    total, overlap, sorted_others = sum(end - start for start, end in spans), 0.0, sorted(others)
    for start, end in spans:
        covered = start
        for begin, until in sorted_others:
            if until > covered and begin < end:
                overlap += min(until, end) - max(begin, covered)
                covered = max(covered, min(until, end))
    return overlap / total if total else 0.0


def peak_bytes(size: Size) -> int | None:
    return torch.cuda.max_memory_allocated(size.where) if size.where.type == "cuda" else None


def clear(size: Size) -> None:
    """Free what the measurement before held."""
    gc.collect()
    if size.where.type == "cuda":
        torch.cuda.init()  # without it the calls below refuse the device
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
