"""ZB-V: a model folded over the devices, without idle time after a device's first action, at 1F1B's memory.

It is from Zero Bubble Pipeline Parallelism (arXiv 2401.10241, section 6; see also arXiv 2405.15362).

Device d of p holds stages d and 2p − 1 − d, here a and b. In microbatches of each stage, in order::

    warm-up     (2(p − d) − 1) × Fa      d × (Fb Fa)      (p − d) × (Fb Ib)
    steady      (Fa Ia Fb Ib) until all forwards are done
    cool-down   d × (Ia Ib)      (p − d) × Ia

W fills the remaining idle time. Microbatches that do not exist are omitted.
"""

from collections.abc import Iterator

from attrs import evolve

from ..actions import Action, Kind
from ..timing.coding import FORWARD, INPUT, WEIGHT
from .construction.order import existing
from .problem import Schedule, ScheduleFamily, ScheduleProblem, folded_placement, refuse_unfolded
from .scored import ROUNDING, time_of

OVERLAPPING = 0.6
"""Share of a W's time that must be idle for W to run there."""


def zb_v(problem: ScheduleProblem) -> Schedule:
    """ZB-V: saved tensors of at most p microbatches on any device.

    Raises:
        RequestError: not two stages per device.
    """
    refuse_unfolded("zb-v", problem.chunks)
    import numpy as np  # here: numpy and compiled code take longer to load than most schedules to build

    from .construction.list_scheduler import Priorities, instance

    p, count = problem.devices, problem.microbatches
    task = instance(problem, folded_placement(p, 2))
    limits = p * task.need[task.stages_on].sum(axis=1)
    keys = np.full((3, 2 * p, count), 6.0 * p * count)  # of W: when nothing else can run
    for device in range(p):
        held = 0.0
        for place, action in enumerate(existing(_row(p, device, count), count)):
            kind, sign = (FORWARD, 1) if action.kind is Kind.F else (INPUT, -1)
            keys[kind, action.stage, action.microbatch] = place
            held += sign * task.need[action.stage]
            limits[device] = max(limits[device], held)
    task = evolve(task, limits=limits * (1 + ROUNDING))
    whole, caps = np.zeros(2 * p, dtype=np.bool_), np.full(2 * p, count)
    # No device waits for the last actions of the first device, and it starts first: a W that overlaps there a little
    # may shorten the longest stage span.
    found = []
    for share in (1.0, OVERLAPPING):
        patience = np.zeros((3, p))
        patience[WEIGHT] = [share] + [1.0] * (p - 1)
        listed = task.listed(Priorities(keys, patience, caps, whole, strict=True))
        found.append(task.schedule("zb-v", *listed[1:]))
    return min(found, key=lambda schedule: time_of(problem, schedule))


def _row(devices: int, device: int, count: int) -> Iterator[Action]:
    """F and I of one device, as if there were enough microbatches."""
    first, second = device, 2 * devices - 1 - device
    done = {(stage, kind): 0 for stage in (first, second) for kind in (Kind.F, Kind.I)}

    def next_of(stage: int, kind: Kind) -> Action:
        done[stage, kind] += 1
        return Action(stage, kind, done[stage, kind] - 1)

    for _ in range(2 * (devices - device) - 1):
        yield next_of(first, Kind.F)
    for _ in range(device):
        yield next_of(second, Kind.F)
        yield next_of(first, Kind.F)
    for _ in range(devices - device):
        yield next_of(second, Kind.F)
        yield next_of(second, Kind.I)
    while done[second, Kind.F] < count:
        yield next_of(first, Kind.F)
        yield next_of(first, Kind.I)
        yield next_of(second, Kind.F)
        yield next_of(second, Kind.I)
    for _ in range(device):
        yield next_of(first, Kind.I)
        yield next_of(second, Kind.I)
    for _ in range(devices - device):
        yield next_of(first, Kind.I)


FAMILY = ScheduleFamily(
    "zb-v", zb_v, "folded, without idle time at 1F1B's memory (Zero Bubble, Controllable Memory)", split_backward=True,
    chunks=(2,), usual_chunks=2, placement=folded_placement,
)  # fmt: skip
