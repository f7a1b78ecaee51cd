"""Whole training programs: trained as a pipeline of threads and by eager PyTorch over the same microbatches."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import frozen
from panpipe.core.capture.batch.batch_dims import AUTO
from panpipe.runtimes.batch.example import Example
from panpipe.runtimes.diagnose.reference import reference_step
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.optimizer.optimizers import OptimizerFactory
from panpipe.runtimes.optimizer.training import Training
from panpipe.runtimes.pipeline import Pipeline
from panpipe.runtimes.weights import weights_from
from torch import Tensor, nn

from ..cuts import even_plan
from .changing import sgd

MICROBATCHES = 2
SIZES = (4, 4, 3, 4, 4)
"""Rows of the batches; the third has a smaller last microbatch."""
SEED = 1


@frozen
class Program:
    """What is trained.

    Args:
        model: in float64.
        step: ``step(model, batch)``.
        batch: ``batch(rows, generator)``, called with the rows of each batch.
        between: called with the number of the step that comes next, before each.
        optimizer: makes the optimizer.
        sizes: rows of each batch.
        dims: ``batch_dims=``.
    """

    model: nn.Module
    step: Callable[[Any, Any], Any]
    batch: Callable[[int, torch.Generator], Any]
    between: Callable[[int], Any] = lambda number: None
    optimizer: OptimizerFactory = sgd
    sizes: Sequence[int] = SIZES
    dims: Any = AUTO


def _batches(program: Program) -> list[Any]:
    generator = torch.Generator().manual_seed(7)
    return [program.batch(rows, generator) for rows in program.sizes]


def eager(make: Callable[[], Program]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of each step, and parameters and buffers at the end, of plain PyTorch."""
    program = _made(make)
    model, losses = program.model, list[float]()
    optimizer = program.optimizer(list(model.named_parameters()))
    assert optimizer is not None
    for number, batch in enumerate(_batches(program)):
        program.between(number)
        loss = reference_step(
            model, program.step, batch, microbatches=MICROBATCHES, seed=SEED, index=number, batch_dims=program.dims
        )
        losses.append(loss.item())
        optimizer.step()
    return losses, _tensors(model)


def pipelined(make: Callable[[], Program], devices: int = 2) -> tuple[list[float], dict[str, Tensor]]:
    """The same of a pipeline."""
    program, losses = _made(make), list[float]()
    model, given = program.model, _batches(program)
    example = Example.capture(model, program.step, given[0], MICROBATCHES, program.dims, "cpu")
    plan = even_plan(example.operators, devices, MICROBATCHES)
    pipe = Pipeline(example, plan, ThreadTeam(devices), Training(optimizer=program.optimizer, seed=SEED))
    pipe.load(weights_from(None, model, SEED))
    with pipe:
        for number, batch in enumerate(given):
            program.between(number)
            losses.append(pipe.step(batch).item())
    return losses, _tensors(model)


def _made(make: Callable[[], Program]) -> Program:
    torch.manual_seed(0)
    return make()


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers: a table that grows has other shapes."""
    return {n: t.detach().clone() for n, t in model.state_dict(keep_vars=True).items()}


def difference(make: Callable[[], Program]) -> float:
    """How far a pipeline's losses and tensors are from eager PyTorch's, at most."""
    losses, wanted = eager(make)
    found, mine = pipelined(make)
    apart = [abs(one - other) for one, other in zip(found, losses, strict=True)]
    for name, tensor in wanted.items():
        if name in mine and tensor.numel():
            apart.append((mine[name].to(tensor.dtype) - tensor).abs().double().max().item())
    return max(math.inf if math.isnan(one) else one for one in apart)
