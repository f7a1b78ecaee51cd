"""Interleaved 1F1B: 1F1B over several stages a device (Narayanan et al. 2021).

Groups of as many microbatches as there are devices go through a device's stages in turn, so that a group comes round
to the device's next stage just when the group has passed through this one. The bubble is 1F1B's divided by the
number of chunks, for more saved tensors: device d holds at most ``(chunks − 1)·devices + 2(devices − 1 − d) + 1``
stages' worth.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import RequestError
from .looped import default_run_ahead, looped_order
from .placement import looped_placement
from .problem import Schedule, ScheduleFamily, ScheduleProblem


def interleaved_1f1b(problem: ScheduleProblem, *, group: int | None = None) -> Schedule:
    """Interleaved 1F1B for any number of microbatches and chunks; with one chunk it is 1F1B.

    Args:
        problem: what to build it for.
        group: microbatches that go through a stage before the device turns to its next one; at least, and by default,
            the number of devices. The last group takes what is left.

    Raises:
        RequestError: a group smaller than the number of devices.
    """
    if group is not None and group < problem.devices:
        raise RequestError(
            f"a group of {group} microbatches: interleaved-1f1b needs at least as many as devices "
            f"({problem.devices}); use looped for smaller groups"
        )
    size = group or problem.devices
    device_actions = looped_order(problem, size, default_run_ahead(problem, size))
    parameters = f"chunks={problem.chunks}" + ("" if size == problem.devices else f",group={size}")
    placement = looped_placement(problem.devices, problem.chunks)
    return Schedule(f"interleaved-1f1b({parameters})", placement, problem.microbatches, device_actions)


def _candidates(problem: ScheduleProblem) -> Iterable[Mapping[str, Any]]:
    """Groups of one microbatch per device; where that leaves a rest, also fewer groups of equal size."""
    yield {}
    rounds = problem.microbatches // problem.devices
    if problem.chunks > 1 and rounds and problem.microbatches % problem.devices:
        yield {"group": -(-problem.microbatches // rounds)}


FAMILY = ScheduleFamily(
    "interleaved-1f1b",
    interleaved_1f1b,
    "1F1B over several stages a device (Megatron-LM)",
    usual_chunks=2,
    candidates=_candidates,
)
