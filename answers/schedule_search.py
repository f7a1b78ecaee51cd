"""The search for schedules of uniform stages: checks of its parameters, and the call."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..core.errors import InfeasibleError, RequestError
from ..core.schedules.problem import ScheduleProblem
from ..core.schedules.registry import resident_families
from ..core.schedules.scored import Scored

PARAMETERS: Mapping[str, Any] = {"evaluations": int, "seconds": float, "seed": int}
"""The parameters of ``auto``, with their types."""


def check_search(given: Mapping[str, Any], limit: float | None) -> None:
    """Check the parameters of a search, and that its memory limit allows one microbatch.

    Raises:
        RequestError: a parameter is out of range.
        InfeasibleError: the limit is below one device's saved tensors for one microbatch.
    """
    if given.get("evaluations", 1) < 1:
        raise RequestError(f"--evaluations is {given['evaluations']}: give at least 1")
    if not 0 < given.get("seconds", 1) < float("inf"):
        raise RequestError(f"--seconds is {given['seconds']:g}: give a finite number above 0")
    if not 0 <= given.get("seed", 0) < 2**31:
        raise RequestError(f"--seed is {given['seed']}: give a number from 0 to 2147483647")
    if limit is not None and limit < 1:
        raise InfeasibleError(
            f"the memory limit is {limit:g}: one microbatch on every stage of a device needs 1; "
            "raise --memory-limit to at least 1"
        )


def run_search(problems: Sequence[ScheduleProblem], given: Mapping[str, Any]) -> Scored:
    """Search schedules; `check_search` has checked the parameters.

    Args:
        problems: one for each number of chunks to try.
        given: ``evaluations``, ``seconds`` and ``seed``.
    """
    from ..core.search.orders.auto import find_schedule  # imported here: compiled code takes a second to load

    return find_schedule(problems, resident_families(), **given)
