"""Uniform stages, for schedules without a model, and schedules for them: by name, or by a search.

Times may be in any unit. The unit of memory is one device's saved tensors for one microbatch, held until W or B ends.
"""

import inspect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import frozen

from ..core.costs.costs import StageCosts
from ..core.errors import InfeasibleError, RequestError
from ..core.schedules.problem import ScheduleFamily, ScheduleProblem
from ..core.schedules.registry import find_family, resident_families
from ..core.schedules.scored import Scored, candidate_schedules, exceeds, frontier, peak_of, score
from ..core.wording import counted
from .options import declared

CHUNKS_TO_TRY = (1, 2, 3, 4)
"""Numbers of stages per device to try if none is given."""


def equal_stages(placement: Sequence[int], times: StageCosts) -> tuple[StageCosts, ...]:
    """One device's costs split evenly over its stages; one byte is saved per stage and microbatch."""
    held = Counter(placement)
    return tuple(
        StageCosts(
            times.forward_s / held[device],
            times.backward_input_s / held[device],
            times.backward_weight_s / held[device],
            saved_bytes=1,
        )
        for device in placement
    )


def uniform_times(
    forward: float, backward_input: float | None, backward_weight: float | None, freed: float
) -> StageCosts:
    """The costs of one device for one microbatch; I and W take as long as F where they are not given.

    Raises:
        RequestError: a time is negative or not finite, or the share ``freed`` is not from 0 to 1.
    """
    backward_input = forward if backward_input is None else backward_input
    backward_weight = forward if backward_weight is None else backward_weight
    named = {"--forward": forward, "--backward-input": backward_input, "--backward-weight": backward_weight}
    for option, value in named.items():
        _check_time(option, value)
    if not 0 <= freed <= 1:
        raise RequestError(f"--freed-by-input is {freed}: give a share from 0 to 1")
    return StageCosts(forward, backward_input, backward_weight, saved_bytes=1, freed_by_input_bytes=freed)


def _check_time(option: str, value: float) -> None:
    if not 0 <= value < float("inf"):
        raise RequestError(f"{option} is {value}: a time must be finite, at least 0")


def numbers(option: str, text: str, kind: type) -> tuple[Any, ...]:
    """The numbers of a comma-separated option.

    Raises:
        RequestError: a part is not a number, is negative, or is not finite.
    """
    try:
        numbers = tuple(kind(word) for word in text.split(","))
    except ValueError:
        raise RequestError(f"{option} is '{text}': write numbers with commas between, such as 3,2,1") from None
    wrong = next((number for number in numbers if not 0 <= number < float("inf")), None)
    if wrong is not None:
        raise RequestError(f"{option} has {wrong}: each number must be finite, at least 0")
    return numbers


def _microbatches_saved(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise RequestError(
            f"--memory-limit is '{text}': its unit is a device's saved tensors for one microbatch, so write a number, "
            "such as 4; for a limit in bytes, plan a model with panpipe plan"
        ) from None


@frozen(kw_only=True)
class UniformStages:
    """A pipeline of equal devices: the options of ``panpipe schedule`` and ``panpipe schedules``."""

    devices: int = declared("Devices along the pipeline.", ...)
    microbatches: int = declared("Microbatches in one step.", ...)
    chunks: int | None = declared("Number of stages of each device; the schedule's usual ones if not given.")
    forward: float = declared("One device's time of F for one microbatch, over all its chunks.", 1.0)
    backward_input: float | None = declared(
        "The same for I, the input-gradient half of a backward; as long as F if not given."
    )
    backward_weight: float | None = declared("The same for W, the weight-gradient half; as long as F if not given.")
    comm: float = declared("Delay of a message on every hop between two devices.", 0.0)
    stage_scale: tuple[float, ...] | None = declared(
        "Factors on the times of each stage.", metavar="S0,S1,…",
        parser=lambda text: numbers("--stage-scale", text, float),
    )  # fmt: skip
    freed_by_input: float = declared("Share of the saved tensors that I already frees.", 0.0)
    memory_limit: float | None = declared(
        "Most memory of a device, in its saved tensors for one microbatch.",
        metavar="NUMBER", parser=_microbatches_saved,
    )  # fmt: skip
    host_copy: float | None = declared(
        "Time to copy one device's saved tensors for one microbatch to the host and back, over all its chunks; if "
        "given, schedules that offload are compared, too."
    )

    @property
    def device(self) -> StageCosts:
        """Costs of one device for one microbatch, over all its chunks."""
        return uniform_times(self.forward, self.backward_input, self.backward_weight, self.freed_by_input)

    def problem(self, chunks: int, limit: float | None) -> ScheduleProblem:
        """The pipeline with ``chunks`` stages on each device, each with an equal part of the device's costs.

        The unit of memory is the saved tensors of one stage: each F adds 1, and sums of integers are exact.

        Args:
            limit: memory limit of a device in its saved tensors for one microbatch, or None.

        Raises:
            RequestError: there are no chunks, or the number of stage factors is not the number of stages.
        """
        if chunks < 1:
            raise RequestError(f"--chunks is {chunks}: a device has at least 1 stage")
        stages, device, scales = max(self.devices, 0) * chunks, self.device, self.stage_scale
        if scales is not None and len(scales) != stages:
            raise RequestError(
                f"--stage-scale has {len(scales)} factors: {self.devices} devices with {counted(chunks, 'chunk')} have "
                f"{stages} stages; give one factor for each"
            )
        costs = tuple(
            StageCosts(
                device.forward_s / chunks * scale,
                device.backward_input_s / chunks * scale,
                device.backward_weight_s / chunks * scale,
                saved_bytes=device.saved_bytes,
                freed_by_input_bytes=device.freed_by_input_bytes,
            )
            for scale in (scales or (1.0,) * stages)
        )
        copy_s = self.host_copy or 0.0
        _check_time("--host-copy", copy_s)
        memory, each = None if limit is None else limit * chunks, copy_s / 2 / (chunks * device.saved_bytes)
        return ScheduleProblem(self.devices, self.microbatches, chunks, costs, self.comm, memory, each)

    @property
    def chunks_to_try(self) -> tuple[int, ...]:
        """The given number of stages a device, or the one that follows from one factor for each stage; empty if neither
        is given. A number of factors that fits no number of chunks is 1, and `problem` raises the error."""
        if self.chunks is not None:
            return (self.chunks,)
        if self.stage_scale is None:
            return ()
        count, devices = len(self.stage_scale), self.devices
        return (count // devices if devices > 0 and count % devices == 0 else 1,)


SEARCH_PARAMETERS = ("evaluations", "seconds", "seed")
"""The parameters of ``auto``."""


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
        _check_parameters("auto", SEARCH_PARAMETERS, given)
        check_search(given, limit)
        return run_search([stages.problem(count, limit) for count in stages.chunks_to_try or CHUNKS_TO_TRY], given)
    family = find_family(name)
    usual = stages.chunks is None and family.chunks is not None  # whatever the number of stage factors
    problem = stages.problem(family.usual_chunks if usual else (*stages.chunks_to_try, family.usual_chunks)[0], limit)
    _check_parameters(name, inspect.signature(family.build).parameters, given)
    scored = score(problem, family.build(problem, **given))
    _check_limit(scored)
    return scored


def _check_parameters(name: str, known: Iterable[str], given: Iterable[str]) -> None:
    """Refuse a parameter that a schedule does not have."""
    unknown = next((key for key in given if key not in known), None)
    if unknown is not None:
        option = "--" + unknown.replace("_", "-")
        raise RequestError(f"{option} is no parameter of {name}: leave it out, or name the schedule that has it")


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
    from ..core.search.find_schedule import find_schedule  # imported here: compiled code takes a second to load

    return find_schedule(problems, resident_families(), **given)


def figures(scored: Scored) -> dict[str, Any]:
    """A schedule's time and memory as plain data, with the names of ``--json`` in all commands and in the explorer."""
    result = scored.result
    return {
        "schedule": scored.schedule.name,
        "chunks": scored.problem.chunks,
        "makespan": result.makespan,
        "bubble_ratio": result.bubble_ratio,
        "stage_span": result.stage_span,
        "stage_span_bubble_ratio": result.stage_span_bubble_ratio,
        "peak_memory": peak_of(scored),
        **({} if scored.bound is None else {"lower_bound": scored.bound, "gap": scored.gap}),
    }


def frontier_of(family: ScheduleFamily, problems: Iterable[ScheduleProblem]) -> list[tuple[Mapping[str, Any], Scored]]:
    """The Pareto frontier of a family over its chunks and parameters, within the memory limit; each schedule with its
    parameters."""
    own = [each for one in problems for each in candidate_schedules(one, family) if not exceeds(each[1])]
    best = frontier([scored for _, scored in own])
    return [each for each in own if any(each[1] is other for other in best)]
