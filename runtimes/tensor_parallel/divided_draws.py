"""Random draws of tensor ranks with the numbers of one process.

A draw of a tensor that all ranks have is the same on all of them. Of a tensor that is divided, such as the weights of a
rank's attention heads, each rank draws the whole and takes its part::

    one process     bernoulli_(B, heads, T, T)
    tensor rank     bernoulli_(B, heads, T, T) ─ own_part ─▶ (B, heads ÷ ranks, T, T) ─ copy_ ─▶ the user's tensor
"""

from typing import Any

import torch
from torch import Tensor

from ...core.capture.graph.randomness import draws_nothing
from ...core.capture.graph.tensor_collectives import OWN_PART
from ...core.capture.values.user_lines import current_line
from ...core.errors import RequestError
from .local_layouts import Local

aten = torch.ops.aten

_IN_PLACE = frozenset(
    {aten.bernoulli_.float, aten.uniform_.default, aten.normal_.default, aten.exponential_.default, aten.random_.to,
     getattr(aten.random_, "from")}
)  # fmt: skip
_LIKE = frozenset(
    {aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype,
     aten.bernoulli.p}
)  # fmt: skip
"""Draws whose numbers depend on the number of elements of their first argument alone."""


def is_draw(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and not draws_nothing(func, args, kwargs)


def draw_part(func: Any, args: Any, kwargs: Any, layout: Local, ranks: int) -> Any:
    """Draw the whole of a divided tensor, and take this rank's part.

    Args:
        func, args, kwargs: the draw for this rank's part, which is the first argument.
        layout: of it.
        ranks: number of tensor ranks.

    Returns:
        What the draw returns.

    Raises:
        RequestError: the operator draws other numbers for other tensors of one shape, or is not known.
    """
    like, rest = args[0], args[1:]
    dim = layout.part
    assert dim is not None
    whole_shape = (*like.shape[:dim], like.shape[dim] * ranks, *like.shape[dim + 1 :])

    def part_of(draw: Any, *values: Any, **options: Any) -> Tensor:
        whole = draw(aten.new_empty.default(like, whole_shape), *values, **options)
        part: Tensor = OWN_PART(whole, dim, layout.outer, ranks)
        return part

    if func in _IN_PLACE:
        return aten.copy_.default(like, part_of(func, *rest, **kwargs))
    if func in _LIKE:
        return part_of(func, *rest, **kwargs)
    if func is aten.native_dropout.default:
        rate = rest[0]
        mask = part_of(aten.bernoulli_.float, 1 - rate)
        return like * mask * 0.0 if rate == 1 else like * (mask / (1 - rate)), mask.to(torch.bool)
    raise unknown_part(func)


def unknown_part(func: Any) -> RequestError:
    """The error for a draw whose part of the numbers of one process is not known."""
    return RequestError(
        f"{current_line()}{func} draws random numbers for a tensor of which this tensor rank's part is not known: "
        "tensor ranks draw the numbers of one process; draw where all ranks have the whole, or set the rate of dropout "
        "to 0"
    )
