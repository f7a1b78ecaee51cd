"""Programs that change something between steps or within: trained as a pipeline and as untouched eager PyTorch."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.errors import RequestError
from panpipe.runtimes.batch.example import Example
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.microbatches import split_batch
from panpipe.runtimes.pipeline import Pipeline
from panpipe.runtimes.session import Session
from panpipe.runtimes.trainer import Trainer
from panpipe.runtimes.update.optimizers import OptimizerFactory
from panpipe.runtimes.update.training import Training
from panpipe.runtimes.weights import weights_from
from torch import Tensor, nn

from ..cuts import even_plan

WIDTH = 4
MICROBATCHES = 2
SIZES = (4, 4, 3, 4, 4)
"""Rows of the batches of a program; the third has a smaller last microbatch."""


def sgd(named: Any) -> torch.optim.Optimizer:
    """Momentum and decay would move a parameter whose gradient is zero instead of none."""
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9, weight_decay=0.1)


@frozen
class Program:
    """What is trained.

    Args:
        model: the model, in float64.
        step: ``step(model, batch)``.
        between: called with the number of the step that comes next, before each.
        optimizer: makes the optimizer.
        sizes: rows of each batch.
        evaluated: evaluate every batch, too, before the step.
    """

    model: nn.Module
    step: Callable[[nn.Module, Any], Any]
    between: Callable[[int], Any] = lambda number: None
    optimizer: OptimizerFactory = sgd
    sizes: Sequence[int] = SIZES
    evaluated: bool = False


def batches(sizes: Sequence[int]) -> list[dict[str, Tensor]]:
    """Vectors, and vectors to predict."""
    generator = torch.Generator().manual_seed(7)
    drawn = [torch.randn(2, rows, WIDTH, dtype=torch.float64, generator=generator) for rows in sizes]
    return [{"x": both[0], "y": both[1]} for both in drawn]


def eager(make: Callable[[], Program]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of each step, and parameters and buffers at the end, of plain PyTorch over the same microbatches."""
    program = make()
    model, losses = program.model, list[float]()
    optimizer = program.optimizer(list(model.named_parameters()))
    assert optimizer is not None
    for number, batch in enumerate(batches(program.sizes)):
        program.between(number)
        pieces = split_batch(batch, MICROBATCHES, fewer=True)
        if program.evaluated:
            kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
            with torch.no_grad():
                losses.append(sum(_loss(program, piece).item() for piece in pieces))
                for buffer, value in kept:
                    buffer.copy_(value)
        optimizer.zero_grad()
        total = 0.0
        for piece in pieces:
            loss = _loss(program, piece)
            if loss.requires_grad:
                loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses, _tensors(model)


def _loss(program: Program, piece: Any) -> Tensor:
    found: Tensor = program.step(program.model, piece.batch) * piece.weight
    return found


def pipelined(make: Callable[[], Program], devices: int = 2) -> tuple[list[float], dict[str, Tensor], Pipeline]:
    """The same of a pipeline of threads."""
    program = make()
    model, losses, given = program.model, list[float](), batches(program.sizes)
    pieces = split_batch(given[0], MICROBATCHES)
    operators = operators_of(capture_step(model, program.step, pieces[0].batch))
    plan = even_plan(operators, devices, MICROBATCHES)
    example = Example(model, program.step, pieces[0], operators)
    pipe = Pipeline(Session(Trainer(example, plan, ThreadTeam(devices), Training(optimizer=program.optimizer, seed=1))))
    pipe._session.load(weights_from(None, model, 1))
    for number, batch in enumerate(given):
        program.between(number)
        if program.evaluated:
            losses.append(pipe.evaluate(batch).item())
        losses.append(pipe.step(batch).item())
    return losses, _tensors(model), pipe


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}


def difference(make: Callable[[], Program]) -> float:
    """How far a pipeline's losses and tensors are from eager PyTorch's, at most."""
    losses, wanted = eager(make)
    found, mine, _ = pipelined(make)
    apart = [abs(one - other) for one, other in zip(found, losses, strict=True)]
    apart += [(mine[name].double() - tensor.double()).abs().max().item() for name, tensor in wanted.items()]
    return max(apart)


def refusal(make: Callable[[], Program]) -> str:
    """The refusal's message; fails where there is none."""
    try:
        pipelined(make)
    except RequestError as error:
        return str(error)
    raise AssertionError("the pipeline refused nothing")


def names_a_line(message: str, file: str) -> bool:
    """Whether a message is one line that names a line of a file."""
    return "\n" not in message and re.search(rf"{re.escape(Path(file).name)}:\d+", message) is not None
