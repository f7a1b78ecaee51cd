"""Nestings of values (as pytrees): extracts their tensors, and fills in others."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .late_numbers import LateNumber

_TENSOR = object()
"""The mark of a tensor among the leaves."""

_NUMBER = object()
"""The mark of a late number, whose value is passed as a tensor."""


_DEEPEST = 3
"""How many objects may be inside of each other."""


@frozen
class _Object:
    """A plain object with tensors among its attributes, such as a list of images with their sizes.

    Args:
        kind: its class.
        attributes: without their tensors.
    """

    kind: type
    attributes: "Nesting"

    def made(self, tensors: Iterator[Tensor]) -> Any:
        """Such an object with these tensors."""
        found: Any = object.__new__(self.kind)
        vars(found).update(self.attributes.filled_from(tensors))
        return found


@frozen
class Nesting:
    """A nesting without its tensors.

    Args:
        spec: its structure.
        leaves: its leaves, with a mark for every tensor and every late number, and objects that hold some.
    """

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """The nesting with these tensors, in order; there may be more of them. Late numbers get their values."""
        return self.filled_from(iter(tensors))

    def filled_from(self, tensors: Iterator[Tensor]) -> Any:
        """The same; takes the tensors that it needs."""

        def whole(leaf: Any) -> Any:
            if leaf is _TENSOR or leaf is _NUMBER:
                return next(tensors) if leaf is _TENSOR else next(tensors).item()
            return leaf.made(tensors) if isinstance(leaf, _Object) else leaf

        return pytree.tree_unflatten(list(map(whole, self.leaves)), self.spec)

    def difference(self, other: "Nesting") -> str | None:
        """The first difference of another nesting's constants, as text; None if they are equal."""
        if self.spec != other.spec:
            return "another structure"
        for mine, its in zip(self.leaves, other.leaves, strict=True):
            if isinstance(mine, _Object) and isinstance(its, _Object):
                if (found := mine.attributes.difference(its.attributes)) is not None:
                    return found
            elif type(mine) in _CONSTANTS and repr(mine) != repr(its):
                return f"{its!r} and not {mine!r}"
        return None


_CONSTANTS = (bool, int, float, complex, str, torch.dtype, torch.Size)
"""Types of leaves that are compared, by their ``repr``, because NaN equals no value."""


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a nesting, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def extract_tensors(value: Any, depth: int = 0) -> tuple[list[Tensor], Nesting]:
    """The tensors of a nesting, including those of late numbers and in plain objects, and the nesting without them."""
    flat, spec = pytree.tree_flatten(value)
    found: list[Tensor] = []
    leaves: list[Any] = []
    for leaf in flat:
        late, tensor = type(leaf) is LateNumber, isinstance(leaf, Tensor)
        if late or tensor:
            found.append(leaf.tensor if late else leaf)
            leaves.append(_NUMBER if late else _TENSOR)
        elif depth < _DEEPEST and _is_plain_object(leaf):
            inner, attributes = extract_tensors(vars(leaf), depth + 1)
            found += inner
            leaves.append(_Object(type(leaf), attributes) if inner else leaf)
        else:
            leaves.append(leaf)
    return found, Nesting(spec, tuple(leaves))


def _is_plain_object(leaf: Any) -> bool:
    """Whether a leaf is an object of a class written in Python, without behaviour of torch's or of a function."""
    return hasattr(leaf, "__dict__") and not isinstance(leaf, nn.Module | type) and not callable(leaf)


def numbers_as_tensors(value: Any) -> Any:
    """A nesting with a float64 tensor for every number."""
    return pytree.tree_map_only(
        (bool, int, float), lambda number: torch.tensor(float(number), dtype=torch.float64), value
    )
