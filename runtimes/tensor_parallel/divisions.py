"""Divided activations: which elements of a tensor of one process a tensor rank has, followed through operators.

The columns of a layer give each rank some features, and the user's code turns them into heads::

    whole    (B, T, 4 × 8)  ─ view ─▶  (B, T, 4, 8)  ─ transpose ─▶  (B, 4, T, 8)  ─ view ─▶  (B × 4, T, 8)
    part     (B, T, 2 × 8)             (B, T, 2, 8)                  (B, 2, T, 8)             (B × 2, T, 8)
    division dim 2, outer 1            dim 2, outer 1                dim 1, outer 1           dim 0, outer B

Only operators whose results are known to be divided in the same way are followed.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from ...core.capture.graph.schemas import arguments_by_name

Shape = tuple[int, ...]


@frozen
class Division:
    """A tensor of which each of the ranks has an equal part.

    Args:
        dim: the dimension that is divided. In the whole it has ``outer`` blocks; of each the ranks have equal parts,
            in their order.
        outer: the number of blocks.
        whole: shape of the whole.
    """

    dim: int
    outer: int
    whole: Shape


Found = tuple[int, int] | None
"""Dimension and number of blocks of the results; None if they are not known."""
Rule = Callable[[Mapping[str, Any], "Operands", Shape, Shape], Found]
"""From arguments by name, divided operands, and the shapes of the first result of the part and of the whole."""


@frozen
class Operands:
    """The tensors of a call.

    Args:
        given: all of them.
        divided: those that are divided, with their divisions.
    """

    given: Sequence[Tensor]
    divided: Sequence[tuple[Tensor, Division]]

    @property
    def only(self) -> tuple[Tensor, Division]:
        """The first divided one."""
        return self.divided[0]


def divisions_of_results(
    func: Any, args: Any, kwargs: Any, operands: Operands, parts: Sequence[Shape], wholes: Sequence[Shape], ranks: int
) -> list[Division] | None:
    """The divisions of an operator's results; None if they are not known.

    Args:
        func, args, kwargs: the call.
        operands: its tensors, at least one of them divided; the others are whole.
        parts: shapes of the results.
        wholes: those of one process.
        ranks: number of tensor ranks.
    """
    rule = _RULES.get(func._schema.name.partition("::")[2])
    if rule is None and torch.Tag.pointwise in func.tags:
        rule = _elementwise
    if rule is None or not parts:
        return None
    found = rule(arguments_by_name(func, args, kwargs), operands, parts[0], wholes[0])
    if found is None:
        return None
    dim, outer = found
    fits = all(
        dim < len(part) and part[dim] % outer == 0 and whole == (*part[:dim], part[dim] * ranks, *part[dim + 1 :])
        for part, whole in zip(parts, wholes, strict=True)
    )
    return [Division(dim, outer, whole) for whole in wholes] if fits else None


def _elementwise(given: Mapping[str, Any], operands: Operands, part: Shape, whole: Shape) -> Found:
    """Operands are aligned at their last dimensions; one that is not divided has one element along the divided one."""
    places = {(len(part) - tensor.ndim + division.dim, division.outer) for tensor, division in operands.divided}
    if len(places) > 1:
        return None
    ((dim, outer),) = places
    divided = [id(tensor) for tensor, _ in operands.divided]
    for tensor in operands.given:
        own = dim - len(part) + tensor.ndim
        if id(tensor) in divided:
            if tensor.shape[own] != part[dim]:
                return None
        elif own >= 0 and tensor.shape[own] != 1:
            return None
    return dim, outer


def _same_order(given: Mapping[str, Any], operands: Operands, part: Shape, whole: Shape) -> Found:
    """The same elements in the same order, in another shape."""
    tensor, division = operands.only
    blocks = prod(tensor.shape[: division.dim]) * division.outer
    if len(part) != len(whole):
        return None
    differing = [dim for dim, (a, b) in enumerate(zip(part, whole, strict=True)) if a != b]
    if len(differing) != 1:
        return None
    (dim,) = differing
    before = prod(part[:dim])
    return (dim, blocks // before) if before and blocks % before == 0 else None


def _transposed(given: Mapping[str, Any], operands: Operands, part: Shape, whole: Shape) -> Found:
    tensor, division = operands.only
    first, second = (given[name] % tensor.ndim for name in ("dim0", "dim1"))
    return {first: second, second: first}.get(division.dim, division.dim), division.outer


def _turned(given: Mapping[str, Any], operands: Operands, part: Shape, whole: Shape) -> Found:
    tensor, division = operands.only
    return tensor.ndim - 1 - division.dim, division.outer


def _permuted(given: Mapping[str, Any], operands: Operands, part: Shape, whole: Shape) -> Found:
    tensor, division = operands.only
    return [dim % tensor.ndim for dim in given["dims"]].index(division.dim), division.outer


def _expanded(given: Mapping[str, Any], operands: Operands, part: Shape, whole: Shape) -> Found:
    tensor, division = operands.only
    dim = division.dim + len(part) - tensor.ndim
    return (dim, division.outer) if part[dim] == tensor.shape[division.dim] else None


def _along(name: str) -> Rule:
    """The operator works along one other dimension, and keeps it."""

    def rule(given: Mapping[str, Any], operands: Operands, part: Shape, whole: Shape) -> Found:
        places = {(division.dim, division.outer) for _, division in operands.divided}
        tensor, division = operands.only
        if len(places) > 1 or len(operands.divided) != len(operands.given):
            return None
        return (division.dim, division.outer) if given[name] % tensor.ndim != division.dim else None

    return rule


def _selected(given: Mapping[str, Any], operands: Operands, part: Shape, whole: Shape) -> Found:
    tensor, division = operands.only
    dim = given["dim"] % tensor.ndim
    return None if dim == division.dim else (division.dim - (dim < division.dim), division.outer)


def _reduced(given: Mapping[str, Any], operands: Operands, part: Shape, whole: Shape) -> Found:
    tensor, division = operands.only
    dims = given.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    over = {dim % tensor.ndim for dim in dims or range(tensor.ndim)}
    if division.dim in over:
        return None
    dropped = 0 if given.get("keepdim") else sum(dim < division.dim for dim in over)
    return division.dim - dropped, division.outer


def _normalized(given: Mapping[str, Any], operands: Operands, part: Shape, whole: Shape) -> Found:
    tensor, division = operands.only
    outside = division.dim < tensor.ndim - len(given["normalized_shape"])
    return (division.dim, division.outer) if outside and len(operands.divided) == 1 else None


def _product(given: Mapping[str, Any], operands: Operands, part: Shape, whole: Shape) -> Found:
    """Of matrices or of batches of them; what is summed over is whole."""
    left, right = given.get("mat1", given["self"]), given["mat2"]
    found = {id(tensor): division for tensor, division in operands.divided}
    a, b = found.get(id(left)), found.get(id(right))
    if any(id(tensor) not in (id(left), id(right)) for tensor, _ in operands.divided):
        return None
    rows, columns = left.ndim - 2, left.ndim - 1
    if a is not None and b is not None:
        both = left.ndim == 3 and a.dim == b.dim == 0 and a.outer == b.outer
        return (0, a.outer) if both else None
    if a is not None:
        return (a.dim, a.outer) if a.dim == rows else None
    assert b is not None
    return (b.dim, b.outer) if b.dim == columns else None


_LIKE = (
    "empty_like", "zeros_like", "ones_like", "full_like", "copy_", "masked_fill_", "fill_", "zero_", "detach", "alias",
    "contiguous", "_to_copy",
)  # fmt: skip
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_LIKE, _elementwise),
    **dict.fromkeys(
        ("view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "unflatten", "unsqueeze", "squeeze"),
        _same_order,
    ),
    "transpose": _transposed,
    "t": _turned,
    "permute": _permuted,
    "expand": _expanded,
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax", "softmax", "log_softmax"), _along("dim")),
    **dict.fromkeys(("slice", "split", "split_with_sizes", "narrow", "chunk", "cumsum"), _along("dim")),
    "cat": _along("dim"),
    "select": _selected,
    **dict.fromkeys(("sum", "mean", "amax", "amin", "var", "std"), _reduced),
    "native_layer_norm": _normalized,
    **dict.fromkeys(("mm", "bmm", "addmm"), _product),
}
"""Operator → how its results are divided; the others are elementwise, or not followed."""
