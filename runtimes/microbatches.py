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
        spec: how they are nested.
        rows: which of them hold a row for each sample.
    """

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    rows: tuple[bool, ...]

    @property
    def samples(self) -> int:
        """How many rows a microbatch of this shape has."""
        return next(int(leaf[0][0]) for leaf, cut in zip(self.leaves, self.rows, strict=True) if cut)

    def __str__(self) -> str:
        shapes = (leaf[0] for leaf in self.leaves if isinstance(leaf, tuple))
        return ", ".join("×".join(map(str, shape)) or "scalar" for shape in shapes)


@frozen
class Microbatch:
    """One microbatch.

    Args:
        leaves: the batch's leaves, flattened, with this microbatch's rows of those that have rows.
        weight: its share of the batch's samples; over a batch they sum to 1.
        samples: how many it has.
        shape: what programs are specialised for; one object for all microbatches of a batch that have it.
    """

    leaves: tuple[Any, ...]
    weight: float
    samples: int
    shape: Shape


def split_batch(
    batch: Any, microbatches: int, *, fewer: bool = False, like: Shape | None = None
) -> tuple[list[Microbatch], pytree.TreeSpec]:
    """Cut a batch along dimension 0 into microbatches whose sizes differ by one sample at most.

    Tensors with as many rows as the first one are cut; all others go whole to every microbatch. By chance a tensor of
    another meaning has as many rows as a smaller batch: with ``like``, those are cut that were cut there.

    Args:
        batch: any nesting of tensors.
        microbatches: how many.
        fewer: make as many microbatches as there are samples, where these are fewer.
        like: shape of a microbatch of another batch of this nesting.

    Returns:
        The microbatches, larger ones first, and the nesting.

    Raises:
        RequestError: fewer samples than microbatches, no sample, or nothing to cut.
    """
    leaves, spec = pytree.tree_flatten(batch)
    rows = like.rows if like is not None and like.spec == spec else _with_rows(leaves)
    samples = _samples(leaves, rows)
    if samples < microbatches and not fewer:
        raise RequestError(
            f"the batch has {samples} samples for {microbatches} microbatches: a microbatch needs at least one; "
            f"use at most {samples} microbatches or a larger batch"
        )
    microbatches = min(microbatches, samples)
    pieces = [
        torch.tensor_split(leaf, microbatches) if cut else (leaf,) * microbatches
        for leaf, cut in zip(leaves, rows, strict=True)
    ]
    size, larger = divmod(samples, microbatches)
    found: list[Microbatch] = []
    shape = None
    for m, leaves_m in enumerate(zip(*pieces, strict=True)):
        if m in (0, larger):
            shape = Shape(tuple(map(_what, leaves_m)), spec, rows)
        assert shape is not None
        found.append(Microbatch(leaves_m, (size + (m < larger)) / samples, size + (m < larger), shape))
    return found, spec


def _with_rows(leaves: list[Any]) -> tuple[bool, ...]:
    """Which leaves have as many rows as the first tensor that has rows."""
    samples = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim), None)
    return tuple(isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == samples for leaf in leaves)


def _samples(leaves: list[Any], rows: tuple[bool, ...]) -> int:
    counts = [
        leaf.shape[0] if isinstance(leaf, Tensor) and leaf.ndim else None
        for leaf, cut in zip(leaves, rows, strict=True)
        if cut
    ]
    if not counts:
        raise RequestError("the batch holds no tensor with rows: give tensors whose dimension 0 is the batch")
    other = next((count for count in counts if count != counts[0]), counts[0])
    if counts[0] is None or other is None or other != counts[0]:
        raise RequestError(
            f"tensors of the batch have {counts[0]} and {other} rows: those that have a row for each sample in the "
            "example all have as many in every batch"
        )
    if counts[0] == 0:
        raise RequestError("the batch has 0 samples: a step needs at least one; leave empty batches out")
    return counts[0]


def _what(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf
