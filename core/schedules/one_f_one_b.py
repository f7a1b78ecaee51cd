"""1F1B: one forward, one backward (Narayanan et al. 2019; Fan et al. 2021).

Device d runs ``devices − d`` forwards before its first backward, the fewest that keep the pipeline full, and then
alternates one backward and one forward. It holds the saved tensors of at most ``min(devices − d, microbatches)``
microbatches. For three devices and four microbatches::

    0  F0 F1 F2 B0 F3 B1 B2 B3
    1  F0 F1 B0 F2 B1 F3 B2 B3
    2  F0 B0 F1 B1 F2 B2 F3 B3
"""

from ..actions import Kind
from ..errors import RequestError
from .construction.order import grouped, merge
from .problem import Schedule, ScheduleFamily, ScheduleProblem, looped_placement


def one_f_one_b(problem: ScheduleProblem) -> Schedule:
    """1F1B with one stage per device.

    Raises:
        RequestError: more than one chunk per device.
    """
    if problem.chunks != 1:
        raise RequestError(
            f"chunks is {problem.chunks}: 1f1b has one stage on each device; use interleaved-1f1b, or give 1"
        )
    m = problem.microbatches
    device_actions = tuple(
        merge(grouped([device], Kind.F, [m]), grouped([device], Kind.B, [m]), problem.devices - device, m)
        for device in range(problem.devices)
    )
    return Schedule("1f1b", looped_placement(problem.devices, 1), m, device_actions)


FAMILY = ScheduleFamily("1f1b", one_f_one_b, "one forward, one backward (PipeDream-flush, DAPPLE)", chunks=(1,))
