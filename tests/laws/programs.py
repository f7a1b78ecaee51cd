"""Programs of a few steps: trained by ``panpipe.pipeline`` and by plain PyTorch over the same microbatches."""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import panpipe
import torch
from attrs import frozen
from torch import Tensor, nn

from .one_process import OneProcess

WIDTH = 4
SIZES = (4, 4, 3, 4, 4)
"""Rows of the batches; the third has a smaller last microbatch."""
OPTIONS: dict[str, Any] = {
    "microbatches": 2, "plan": panpipe.Auto(schedule="1f1b", max_chunks=1), "run": panpipe.Run(seed=1, progress=False),
}  # fmt: skip


def sgd(named: Any) -> torch.optim.Optimizer:
    """Momentum and decay would move a parameter whose gradient is zero instead of none."""
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9, weight_decay=0.1)


def vectors(rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Vectors, and vectors to predict."""
    return dict(zip("xy", torch.randn(2, rows, WIDTH, dtype=torch.float64, generator=generator), strict=True))


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
        dims: ``batch_dims=``, if given.
        evaluated: whether every batch is evaluated, too, before the step.
        keyed: whether it may draw random numbers.
    """

    model: nn.Module
    step: Callable[[Any, Any], Any]
    batch: Callable[[int, torch.Generator], Any] = vectors
    between: Callable[[int], Any] = lambda number: None
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    sizes: Sequence[int] = SIZES
    dims: Any = None
    evaluated: bool = False
    keyed: bool = True


def trained(make: Callable[[], Program], pipeline: Callable[..., Any]) -> tuple[list[float], nn.Module]:
    """The losses of a program's evaluations and steps, and its model at the end.

    Args:
        make: makes the program.
        pipeline: ``panpipe.pipeline``, or what is like it.
    """
    torch.manual_seed(0)
    program, generator, losses = make(), torch.Generator().manual_seed(7), list[float]()
    batches = [program.batch(rows, generator) for rows in program.sizes]
    options = OPTIONS if program.dims is None else {**OPTIONS, "batch_dims": program.dims}
    if pipeline is OneProcess:
        options = {**options, "keyed": program.keyed}
    with pipeline(program.model, program.step, batches[0], optimizer=program.optimizer, **options) as pipe:
        for number, batch in enumerate(batches):
            program.between(number)
            if program.evaluated:
                losses.append(pipe.evaluate(batch).item())
            losses.append(pipe.step(batch).item())
    return losses, program.model


def difference(make: Callable[[], Program]) -> float:
    """How far a pipeline's losses and tensors are from those of plain PyTorch, at most."""
    losses, alone = trained(make, OneProcess)
    found, model = trained(make, panpipe.pipeline)
    apart = [abs(one - other) for one, other in zip(found, losses, strict=True)]
    mine = {**model.state_dict(), **dict(model.named_buffers())}
    for name, tensor in alone.state_dict().items():
        assert mine[name].shape == tensor.shape, name
    for name, tensor in (*alone.state_dict().items(), *alone.named_buffers()):
        if name in mine and tensor.numel() and mine[name].shape == tensor.shape:  # a table may have grown further
            wide = torch.promote_types(tensor.dtype, torch.float64)
            apart.append((mine[name].to(wide) - tensor.to(wide)).abs().max().item())
    return max(math.inf if math.isnan(one) else one for one in apart)


def refusal(make: Callable[[], Program]) -> str:
    """The refusal's message; fails where there is none."""
    try:
        trained(make, panpipe.pipeline)
    except panpipe.RequestError as error:
        return str(error)
    raise AssertionError("the pipeline refused nothing")


def names_a_line(message: str, file: str) -> bool:
    """Whether a message is one line that names a line of a file."""
    return "\n" not in message and re.search(rf"{re.escape(Path(file).name)}:\d+", message) is not None
