"""Cutting a batch into microbatches."""

from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.utils import _pytree as pytree

from ..core.errors import RequestError


@frozen(cache_hash=True)
class Shape:
    """What programs are specialised for.

    Args:
        leaves: shape and dtype of every tensor in the batch, and the value of everything else.
    """

    leaves: tuple[Any, ...]


@frozen
class Microbatch:
    """One microbatch.

    Args:
        leaves: the batch's leaves, flattened, with this microbatch's rows of those that have rows.
        weight: its share of the batch's samples; over a batch they sum to 1.
        shape: what programs are specialised for; one object for all microbatches of a batch that have it.
    """

    leaves: tuple[Any, ...]
    weight: float
    shape: Shape


def split_batch(batch: Any, microbatches: int) -> tuple[list[Microbatch], pytree.TreeSpec]:
    """Cut a batch along dimension 0 into microbatches whose sizes differ by one sample at most.

    Tensors with as many rows as the first one are cut; all others go whole to every microbatch.

    Args:
        batch: any nesting of tensors.
        microbatches: how many.

    Returns:
        The microbatches, larger ones first, and the nesting.

    Raises:
        RequestError: fewer samples than microbatches, or nothing to cut.
    """
    leaves, spec = pytree.tree_flatten(batch)
    samples = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim), None)
    if samples is None:
        raise RequestError("the batch holds no tensor with rows: give tensors whose dimension 0 is the batch")
    if samples < microbatches:
        raise RequestError(
            f"the batch has {samples} samples for {microbatches} microbatches: a microbatch needs at least one; "
            f"use at most {samples} microbatches or a larger batch"
        )
    pieces = [
        torch.tensor_split(leaf, microbatches)
        if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == samples
        else (leaf,) * microbatches
        for leaf in leaves
    ]
    size, larger = divmod(samples, microbatches)
    found: list[Microbatch] = []
    shape = None
    for m, leaves_m in enumerate(zip(*pieces, strict=True)):
        if m in (0, larger):
            shape = _shape(leaves_m)
        assert shape is not None
        found.append(Microbatch(leaves_m, (size + (m < larger)) / samples, shape))
    return found, spec


def _shape(leaves: tuple[Any, ...]) -> Shape:
    return Shape(tuple((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves))
