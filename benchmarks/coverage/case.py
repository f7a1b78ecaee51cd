"""What a model of a suite is."""

from collections.abc import Callable
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, nn

ROWS = 8
"""Samples in each batch."""


@frozen
class Case:
    """A model with its training step.

    Args:
        model: with random weights, in training mode.
        step: ``step(model, batch)``, as its own training script computes the loss.
        batch: of random values, in the shapes of real ones.
        options: for the second try, if the default call is refused: where the samples are, or one microbatch for a
            batch that is one sample. The reference has them, too.
    """

    model: nn.Module
    step: Callable[[Any, Any], Any]
    batch: Any
    options: dict[str, Any] = field(factory=lambda: {"batch_dims": 0})


Suite = dict[str, Callable[[], Case]]


def images(size: int = 64, channels: int = 3, rows: int = ROWS) -> Tensor:
    """Random images."""
    return torch.randn(rows, channels, size, size)


def classes(count: int, *shape: int) -> Tensor:
    """Random class numbers, one a sample if no shape is given."""
    return torch.randint(0, count, shape or (ROWS,))
