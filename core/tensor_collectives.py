"""Collectives over the tensor ranks of a stage, as operators of a captured graph.

A model of one tensor rank computes with its own part of each weight. It calls `ALL_REDUCE` where the parts of a result
are summed, and `ALL_GATHER` and `REDUCE_SCATTER` where each rank holds a slice of an activation's first dimension. The
gradient of a sum is the sum of all ranks' gradients: so a block with two all-reduces in its forward has two in its
backward, as in Megatron-LM (arXiv 1909.08053, section 3). A gather and a scatter are each other's gradients.

These are derivatives of the *sum* of all ranks' losses by what one rank holds. Every rank has the same loss, so a
gradient is as many times too large as there are ranks, and the gradient of a parameter that all ranks hold is the sum
of theirs::

    part of a parameter     gradient = own result ÷ ranks
    whole parameter         gradient = sum of all ranks' results ÷ ranks

`ALL_TO_ALL` sends each expert rank the tokens of its experts, an equal part of the first dimension. It is for plans of
mixture models alone, whose ranks do not train.

`OWN_PART` takes a rank's part of a tensor that all ranks have, such as the random numbers of one process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

SUM, MAX = "sum", "max"


class Collectives(Protocol):
    """What runs the operators; each call is made by all tensor ranks, in one order, and waits for the result."""

    @property
    def rank(self) -> int:
        """The number of this rank among them."""

    def all_reduce(self, part: Tensor, operation: str) -> None:
        """Sum a contiguous tensor over the ranks, in place, or take its maximum."""

    def all_gather(self, part: Tensor, whole: Tensor) -> None:
        """Write the ranks' tensors, one after another, into ``whole``."""

    def reduce_scatter(self, whole: Tensor, part: Tensor) -> None:
        """Sum ``whole`` over the ranks, and write this rank's slice into ``part``."""


class OneRank:
    """The collectives of one rank without the others, as in a profile: it computes as if all ranks had its values,
    except for constant factors."""

    rank = 0

    def all_reduce(self, part: Tensor, operation: str) -> None:
        """See `Collectives`."""

    def all_gather(self, part: Tensor, whole: Tensor) -> None:
        """See `Collectives`."""
        whole.copy_(part.repeat(whole.shape[0] // part.shape[0], *[1] * (part.ndim - 1)))

    def reduce_scatter(self, whole: Tensor, part: Tensor) -> None:
        """See `Collectives`."""
        part.copy_(whole[: part.shape[0]])


_running: list[Collectives] = []


@contextmanager
def communicating(collectives: Collectives) -> Iterator[None]:
    """A context in which the operators are run by this object, in all threads of this process."""
    _running.append(collectives)
    try:
        yield
    finally:
        _running.remove(collectives)


def _active() -> Collectives:
    if not _running:
        raise RuntimeError("a collective of tensor ranks runs outside of a step: no ranks are known there")
    return _running[-1]


_library = torch.library.Library("panpipe_tensor", "DEF")
_library.define("all_reduce(Tensor part, str operation) -> Tensor")
_library.define("all_gather(Tensor part, int ranks) -> Tensor")
_library.define("reduce_scatter(Tensor whole, int ranks) -> Tensor")
_library.define("all_to_all(Tensor part, int ranks) -> Tensor")
_library.define("own_part(Tensor whole, int dim, SymInt outer, int ranks) -> Tensor")
ALL_REDUCE = torch.ops.panpipe_tensor.all_reduce.default
ALL_GATHER = torch.ops.panpipe_tensor.all_gather.default
REDUCE_SCATTER = torch.ops.panpipe_tensor.reduce_scatter.default
ALL_TO_ALL = torch.ops.panpipe_tensor.all_to_all.default
OWN_PART = torch.ops.panpipe_tensor.own_part.default
"""This rank's part along a dimension of ``outer`` blocks, of each of which the ranks have equal parts."""


def _empty_sum(part: Tensor, operation: str) -> Tensor:
    return torch.empty_like(part, memory_format=torch.contiguous_format)


def _empty_whole(part: Tensor, ranks: int) -> Tensor:
    return part.new_empty((part.shape[0] * ranks, *part.shape[1:]))


def _empty_part(whole: Tensor, ranks: int) -> Tensor:
    return whole.new_empty((whole.shape[0] // ranks, *whole.shape[1:]))


def _all_reduce(part: Tensor, operation: str) -> Tensor:
    whole = part.clone(memory_format=torch.contiguous_format)
    _active().all_reduce(whole, operation)
    return whole


def _all_gather(part: Tensor, ranks: int) -> Tensor:
    whole = _empty_whole(part, ranks)
    _active().all_gather(part.contiguous(), whole)
    return whole


def _reduce_scatter(whole: Tensor, ranks: int) -> Tensor:
    part = _empty_part(whole, ranks)
    _active().reduce_scatter(whole.contiguous(), part)
    return part


def _all_to_all(part: Tensor, ranks: int) -> Tensor:
    raise RuntimeError("expert ranks are planned and simulated; they do not train")


def _empty_own_part(whole: Tensor, dim: int, outer: int, ranks: int) -> Tensor:
    return whole.new_empty((*whole.shape[:dim], whole.shape[dim] // ranks, *whole.shape[dim + 1 :]))


def _own_part(whole: Tensor, dim: int, outer: int, ranks: int) -> Tensor:
    blocks = whole.unflatten(dim, (outer, ranks, -1))
    part: Tensor = blocks.select(dim + 1, _active().rank).flatten(dim, dim + 1)
    return part.clone(memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Tensor, Any], output: Tensor) -> None:
    ctx.given = inputs[1]


def _of_sum(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
    # A maximum is subtracted before a softmax, which does not depend on it.
    return ALL_REDUCE(gradient, SUM) if ctx.given == SUM else None, None


for _name, _real, _fake, _differentiate in (
    ("all_reduce", _all_reduce, _empty_sum, _of_sum),
    ("all_gather", _all_gather, _empty_whole, lambda ctx, gradient: (REDUCE_SCATTER(gradient, ctx.given), None)),
    (
        "all_to_all",
        _all_to_all,
        lambda part, ranks: torch.empty_like(part),
        lambda ctx, gradient: (ALL_TO_ALL(gradient.contiguous(), ctx.given), None),
    ),
    ("reduce_scatter", _reduce_scatter, _empty_part, lambda ctx, gradient: (ALL_GATHER(gradient, ctx.given), None)),
):
    _library.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"panpipe_tensor::{_name}", _fake, lib=_library)
    torch.library.register_autograd(f"panpipe_tensor::{_name}", _differentiate, setup_context=_save, lib=_library)

_library.impl("own_part", _own_part, "CompositeExplicitAutograd")  # of what has no gradient
torch.library.register_fake("panpipe_tensor::own_part", _empty_own_part, lib=_library)
