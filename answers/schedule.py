"""Build a schedule by its name, for uniform stages."""

import inspect
from collections.abc import Container, Mapping
from typing import Any, get_args

from ..core.errors import InfeasibleError, RequestError
from ..core.schedules.registry import find_family
from ..core.schedules.scored import Scored, exceeds, score
from .searching import PARAMETERS, check_search, run_search
from .uniform import CHUNKS_TO_TRY, UniformStages

_SINGLE = {bool, int, float, str, type(None)}
"""Types of parameters that have one value."""


def build_schedule(
    name: str, stages: UniformStages, chunks: int | None, given: Mapping[str, Any], memory_limit: float | None
) -> Scored:
    """The named schedule; for ``auto`` the fastest one found, over every number of chunks.

    Args:
        name: name of a schedule family, or ``auto``.
        stages: the pipeline.
        chunks: number of stages of a device; if None the family's usual number, and for ``auto`` several are tried.
        given: parameters of the schedule, or of the search.
        memory_limit: of a device; the unit is its saved tensors for one microbatch.

    Raises:
        RequestError: there is no such schedule, or it has no such parameter.
        InfeasibleError: the schedule exceeds the memory limit.
    """
    problems = [stages.problem(count, memory_limit) for count in _chunks_to_try(name, chunks, stages)]
    if name == "auto":
        _check_parameters("auto", PARAMETERS, given)
        check_search(given, memory_limit)
        return run_search(problems, given)
    family = find_family(name)
    known = inspect.signature(family.build).parameters
    _check_parameters(name, known, given)
    for parameter, value in given.items():
        kind = known[parameter].annotation
        if isinstance(value, list | dict) and {*(get_args(kind) or (kind,))} <= _SINGLE:
            raise RequestError(f"{parameter} of '{name}' is {str(value)[:100]}: give one value, not several")
    scored = score(problems[0], family.build(problems[0], **given))
    _check_limit(scored)
    return scored


def _check_parameters(name: str, known: Container[str], given: Mapping[str, Any]) -> None:
    unknown = next((key for key in given if key not in known), None)
    if unknown is not None:
        option = "--" + unknown.replace("_", "-")
        raise RequestError(f"{option} is no parameter of {name}: leave it out, or name the schedule that has it")


def _chunks_to_try(name: str, chunks: int | None, stages: UniformStages) -> tuple[int, ...]:
    """The given number; otherwise the one that follows from ``--stage-scale``; otherwise the usual ones."""
    if chunks is not None:
        return (chunks,)
    scaled = stages.chunks_by_scales
    if name == "auto":
        return scaled or CHUNKS_TO_TRY
    family = find_family(name)
    return (scaled[0] if scaled and family.chunks is None else family.usual_chunks,)


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
