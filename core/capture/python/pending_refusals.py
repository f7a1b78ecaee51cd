"""Refusals that are decided later: a step assigns a value that it also reads, and may only set something up.

Examples are a table of positions that is None at first, its size, and a table that grows with longer sequences. Trial
runs of the step show whether later runs compute the same with them (`..export.set_up_values`), or whether a number that
changes in each run only reaches texts and Python objects (`..export.kept_number_runs`).
"""

from collections.abc import Iterable
from typing import Any

from attrs import frozen
from torch import Tensor

from ...errors import RequestError


@frozen(eq=False)
class PendingRefusal:
    """A value that a step assigns and reads.

    Args:
        refusal: of the step, if it does not only set the value up.
        number: the name of the attribute or variable, or the key, if the value is a number: a number that changes in
            each run is kept, such as a count.
        kept: whether the number is computed from a tensor, so that it changes in each step.
        remark: the user's line and a warning, if the number is kept and allowed.
    """

    refusal: RequestError
    number: Any = None
    kept: bool = False
    remark: tuple[str, str] | None = None


def have_grown(replaced: Iterable[tuple[Any, Any]]) -> bool:
    """Whether tensors were replaced by tensors of other shapes, such as a table that became too small.

    A state does not change its shape in each step. A tensor on meta has no values to compare, and counts as a state.

    Args:
        replaced: (the earlier tensor, the present value).
    """
    return all(
        isinstance(old, Tensor) and isinstance(new, Tensor) and not old.is_meta and new.shape != old.shape
        for old, new in replaced
    )
