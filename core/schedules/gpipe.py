"""GPipe: all forwards, then all backwards (Huang et al. 2019).

With several chunks per device it is the breadth-first looped pipeline (Lamy-Poirier 2022): all microbatches go through
one stage before the device runs its next stage. The device holds saved tensors of all microbatches at once.
"""

from ..actions import Kind
from .construction.order import grouped
from .problem import Schedule, ScheduleFamily, ScheduleProblem, looped_placement


def gpipe(problem: ScheduleProblem) -> Schedule:
    """All forwards of a device, stage by stage, then all backwards, last stage first. Any number of chunks."""
    m = problem.microbatches
    device_actions = []
    for device in range(problem.devices):
        stages = range(device, problem.stages, problem.devices)
        device_actions.append((*grouped(stages, Kind.F, [m]), *grouped(stages[::-1], Kind.B, [m])))
    name = "gpipe" if problem.chunks == 1 else f"gpipe(chunks={problem.chunks})"
    return Schedule(name, looped_placement(problem.devices, problem.chunks), m, tuple(device_actions))


FAMILY = ScheduleFamily(
    "gpipe", gpipe, "all forwards, then all backwards (GPipe; with chunks the breadth-first looped pipeline)"
)
