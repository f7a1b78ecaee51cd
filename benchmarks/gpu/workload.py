"""What the parts of the GPU benchmark train, and how they time it; `gpu_parts` has the parts."""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import panpipe
import torch
from attrs import frozen
from panpipe.core.capture.export.operators import operators_of, tensor_bytes
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
        compiler: backend of ``torch.compile``.
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
    compiler: str = "inductor"

    @property
    def where(self) -> torch.device:
        return torch.device(self.device)


TOY = Size("cpu", 16, 2, 32, 8, 4, 2, 1, 1, (2,), "eager")


def step_in_bfloat16(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The training step, in bfloat16 by autocast."""
    with torch.autocast(batch[0].device.type, torch.bfloat16):
        return gpt.step(model, batch)


def model_of(size: Size) -> nn.Module:
    return gpt.stack(gpt.Block, size.width, size.layers, size.vocabulary).to(size.where)


def batch_of(size: Size, where: torch.device | str = "cpu") -> tuple[torch.Tensor, ...]:
    return tuple(tensor.to(where) for tensor in gpt.data(size.rows, size.length, size.vocabulary))


def synchronize(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def plan_of(size: Size, model: nn.Module, step: Any, batch: Any, stages: int, schedule: str = "1f1b") -> Plan:
    """A plan with as many operators in each stage, made without measurements."""
    piece = tuple(tensor[: len(tensor) // size.microbatches].to(size.where) for tensor in batch)
    operators = operators_of(capture_step(model, step, piece, device=size.where.type))
    sizes = {n: tensor_bytes(operators.values[p]) for p, n in operators.step.parameters.items()}
    problem = ScheduleProblem(stages, size.microbatches, 1)
    return even_plan(operators.graph, find_family(schedule).build(problem), sizes)


def pipeline_of(
    size: Size, stages: int, model: nn.Module, step: Any, batch: Any, optimizer: Any = torch.optim.AdamW, **options: Any
) -> panpipe.Pipeline:
    """A pipeline whose stages share the device."""
    plan = plan_of(size, model, step, batch, stages)
    names = ",".join([size.device] * stages)
    return panpipe.pipeline(
        model, step, batch, plan=plan, optimizer=optimizer, devices=names, share_devices=True, progress=False, **options
    )


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


def summary(seconds: list[float]) -> Found:
    return {"median_s": statistics.median(seconds), "least_s": min(seconds), "most_s": max(seconds)}


def peak_bytes(size: Size) -> int | None:
    return torch.cuda.max_memory_allocated(size.where) if size.where.type == "cuda" else None


def clear(size: Size) -> None:
    """Free what the measurement before held."""
    gc.collect()
    if size.where.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(size.where)
