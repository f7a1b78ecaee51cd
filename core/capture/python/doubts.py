"""Refusals that are decided later: a step assigns what it also reads, and it may only set something up.

A table of positions that is None at first, its size, a table that grows with longer sequences: trial runs of the step
show whether a later run computes the same with them (`..export.set_up`).
"""

from collections.abc import Iterable
from typing import Any

from attrs import frozen
from torch import Tensor

from ...errors import RequestError


@frozen(eq=False)
class Doubt:
    """Something that a step assigns and reads.

    Args:
        refusal: of the step, where it does not only set it up.
        number: the name of the attribute or variable, or the key, where it is a number: one that goes on changing is
            a count.
    """

    refusal: RequestError
    number: Any = None


def have_grown(replaced: Iterable[tuple[Any, Any]]) -> bool:
    """Whether tensors were replaced by tensors of other shapes, as a table is that has become too small.

    No state has another shape at each step. A tensor on meta has no values to compare with, and counts as a state.

    Args:
        replaced: (the tensor before, what is in its place now).
    """
    return all(
        isinstance(old, Tensor) and isinstance(new, Tensor) and not old.is_meta and new.shape != old.shape
        for old, new in replaced
    )
