"""Build a schedule for uniform stages: by its name, or by a search."""

import inspect
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from ..core.errors import InfeasibleError, RequestError
from ..core.schedules.problem import ScheduleProblem
from ..core.schedules.registry import find_family, resident_families
from ..core.schedules.scored import Scored, exceeds, score
from .uniform import CHUNKS_TO_TRY, UniformStages

PARAMETERS: Mapping[str, Any] = {"evaluations": int, "seconds": float, "seed": int}
"""The parameters of ``auto``, with their types."""
_SINGLE = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
"""Types of parameters that have one value, in words."""


def build_schedule(name: str, stages: UniformStages, given: Mapping[str, Any], *, limited: bool = True) -> Scored:
    """The named schedule; for ``auto`` the fastest one found, over every number of chunks.

    Args:
        stages: the pipeline; without ``chunks`` the family's usual number is used, and several by ``auto``.
        given: parameters of the schedule, or of the search.

    Raises:
        RequestError: there is no such schedule, or it has no such parameter.
        InfeasibleError: the schedule exceeds the memory limit.
    """
    limit = stages.memory_limit if limited else None
    if name == "auto":
        _check_parameters("auto", PARAMETERS, given)
        check_search(given, limit)
        return run_search([stages.problem(count, limit) for count in stages.chunks_to_try or CHUNKS_TO_TRY], given)
    family = find_family(name)
    usual = stages.chunks is None and family.chunks is not None  # whatever the number of stage factors
    problem = stages.problem(family.usual_chunks if usual else (*stages.chunks_to_try, family.usual_chunks)[0], limit)
    known = inspect.signature(family.build).parameters
    _check_parameters(name, {key: one.annotation for key, one in known.items()}, given)
    scored = score(problem, family.build(problem, **given))
    _check_limit(scored)
    return scored


def _check_parameters(name: str, known: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse a parameter that a schedule does not have, or a value of another type than its own in ``known``."""
    unknown = next((key for key in given if key not in known), None)
    if unknown is not None:
        option = "--" + unknown.replace("_", "-")
        raise RequestError(f"{option} is no parameter of {name}: leave it out, or name the schedule that has it")
    for parameter, value in given.items():
        kinds = _alternatives(known[parameter])
        if not any(_fits(value, kind) for kind in kinds):
            wanted = " or ".join(_in_words(kind) for kind in kinds if kind is not NoneType)
            raise RequestError(f"{parameter} of '{name}' is {repr(value)[:100]}: give {wanted}")


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _fits(value: object, kind: Any) -> bool:
    """Whether a value is of a type; True for types that are neither one of `_SINGLE` nor a sequence of it."""
    if kind is float:
        return type(value) in (int, float)
    if kind in _SINGLE or kind is NoneType:
        return type(value) is kind
    if get_origin(kind) is Sequence:
        return isinstance(value, list | tuple) and all(_fits(each, one) for each in value for one in get_args(kind))
    return True


def _in_words(kind: Any) -> str:
    if kind in _SINGLE:
        return _SINGLE[kind]
    return "a list, each " + " or ".join(_in_words(each) for each in get_args(kind))


def _check_limit(scored: Scored) -> None:
    if not exceeds(scored):
        return
    result, chunks = scored.result, scored.problem.chunks
    device = max(range(scored.problem.devices), key=lambda d: result.peak_memory[d])
    action = scored.schedule.device_actions[device][result.peak_position[device]]
    peak, limit = result.peak_memory[device] / chunks, (scored.problem.memory_limit or 0.0) / chunks
    raise InfeasibleError(
        f"{scored.schedule.name} holds {peak:g} on device {device} at {action}, {peak - limit:g} over the limit of "
        f"{limit:g}: raise --memory-limit to {peak:g}, or let auto find a schedule with less memory"
    )


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
    """Search schedules of several numbers of chunks; `check_search` has checked the parameters."""
    from ..core.search.orders.auto import find_schedule  # imported here: compiled code takes a second to load

    return find_schedule(problems, resident_families(), **given)
