"""Nestings of values: their tensors taken out, and put back."""

from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.utils import _pytree as pytree

_TENSOR = object()
"""Stands for a tensor among the leaves."""


@frozen
class Nesting:
    """A nesting without its tensors.

    Args:
        spec: its structure.
        leaves: its leaves, with a mark for every tensor.
    """

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """The nesting with these tensors, in order; there may be more of them."""
        remaining = iter(tensors)
        whole = [next(remaining) if leaf is _TENSOR else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(whole, self.spec)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a nesting, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def taken_apart(value: Any) -> tuple[list[Tensor], Nesting]:
    """A nesting's tensors, and the rest."""
    flat, spec = pytree.tree_flatten(value)
    leaves = tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in flat)
    return tensors_of(flat), Nesting(spec, leaves)


def numbers_as_tensors(value: Any) -> Any:
    """A nesting with a float64 tensor for every number."""
    return pytree.tree_map_only(
        (bool, int, float), lambda number: torch.tensor(float(number), dtype=torch.float64), value
    )
