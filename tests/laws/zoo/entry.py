"""What a model of the zoo is."""

from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen
from torch import nn


@frozen
class Entry:
    """A model of the zoo: a real architecture in a small configuration, with random weights.

    Args:
        name: as its users call it.
        source: the library that it comes from: ``transformers``, ``diffusers`` or ``torch``.
        make: makes it; called under a fixed seed. Dropout is on where the architecture has any.
        step: its training step, as a user writes one.
        batch: makes a batch of this many rows; floating-point tensors are float32 and are converted where needed.
        shows: what it is here for, in addition to its architecture.
        float64: whether all its operators have a float64 form.
        refusal: a part of the message with which it is refused, where it is one that no pipeline trains as one process
            does; "" for one that trains.
    """

    name: str
    source: str
    make: Callable[[], nn.Module]
    step: Callable[[nn.Module, Any], Any]
    batch: Callable[[int], Any]
    shows: str = ""
    float64: bool = True
    refusal: str = ""


def generator() -> torch.Generator:
    """Every batch is the same one."""
    return torch.Generator().manual_seed(1)


def tokens(rows: int, length: int, vocabulary: int) -> torch.Tensor:
    """Random token numbers of shape (rows, length); 0 and 1 are left for padding and the like."""
    return torch.randint(2, vocabulary, (rows, length), generator=generator())


def images(rows: int, size: int, channels: int = 3) -> torch.Tensor:
    """Random images of shape (rows, channels, size, size)."""
    return torch.randn(rows, channels, size, size, generator=generator())


def classes(rows: int, count: int) -> torch.Tensor:
    """Random class numbers of shape (rows,)."""
    return torch.randint(0, count, (rows,), generator=generator())
