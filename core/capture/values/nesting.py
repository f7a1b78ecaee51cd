"""Nestings of values (as pytrees): extracts their tensors, and fills in others."""

from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.utils import _pytree as pytree

from .late_numbers import LateNumber

_TENSOR = object()
"""The mark of a tensor among the leaves."""

_NUMBER = object()
"""The mark of a late number, whose value is passed as a tensor."""


@frozen
class Nesting:
    """A nesting without its tensors.

    Args:
        spec: its structure.
        leaves: its leaves, with a mark for every tensor and every late number.
    """

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """The nesting with these tensors, in order; there may be more of them. Late numbers get their values."""
        remaining = iter(tensors)
        whole = [
            next(remaining) if leaf is _TENSOR else next(remaining).item() if leaf is _NUMBER else leaf
            for leaf in self.leaves
        ]
        return pytree.tree_unflatten(whole, self.spec)

    def difference(self, other: "Nesting") -> str | None:
        """The first difference of another nesting's constants, as text; None if they are equal."""
        if self.spec != other.spec:
            return "another structure"
        for mine, its in zip(self.leaves, other.leaves, strict=True):
            if type(mine) in _CONSTANTS and repr(mine) != repr(its):
                return f"{its!r} and not {mine!r}"
        return None


_CONSTANTS = (bool, int, float, complex, str, torch.dtype, torch.Size)
"""Types of leaves that are compared, by their ``repr``, because NaN equals no value."""


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a nesting, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def extract_tensors(value: Any) -> tuple[list[Tensor], Nesting]:
    """The tensors of a nesting, including those of late numbers, and the nesting without them."""
    flat, spec = pytree.tree_flatten(value)
    found: list[Tensor] = []
    leaves: list[Any] = []
    for leaf in flat:
        late, tensor = type(leaf) is LateNumber, isinstance(leaf, Tensor)
        leaves.append(_NUMBER if late else _TENSOR if tensor else leaf)
        found += [leaf.tensor if late else leaf] if late or tensor else []
    return found, Nesting(spec, tuple(leaves))


def numbers_as_tensors(value: Any) -> Any:
    """A nesting with a float64 tensor for every number."""
    return pytree.tree_map_only(
        (bool, int, float), lambda number: torch.tensor(float(number), dtype=torch.float64), value
    )
