"""V-Min and V-Half: schedules for the model folded over the devices (Controllable Memory, arXiv 2405.15362).

Device d holds stages d and 2p − 1 − d. One microbatch's passes form a building block: the slots of F and I on every
stage. The block is repeated every six slots, one for each of a device's F, F, I, I, W and W. The sooner the backward of
a stage follows its forward, the less is held: V-Min goes one slot a stage everywhere, V-Half two on the way out.

1. Repeat: the slot of a pass is its slot in the block plus six for each microbatch.
2. Squeeze: only the order counts, so slots in which a device would idle vanish.
3. W goes where a device would idle, or where the next F would hold more than the block does.
"""

from ..actions import Action, Kind
from ..errors import RequestError
from .fill import fill_weights
from .placement import folded_placement
from .problem import Schedule, ScheduleFamily, ScheduleProblem

PERIOD = 6
"""Slots between one microbatch and the next: what a device runs for each of them."""

Slots = tuple[int, int, int, int]


def v_min_slots(device: int, devices: int) -> Slots:
    """Slots of F on the first stage, F and I on the second, and I on the first, in V-Min's block."""
    d, p = device, devices
    late = 2 if p % 3 == 0 else 0  # otherwise two passes of a device would share a slot
    return d, 2 * p - 1 - d, 2 * p + late + d, 4 * p + late - 1 - d


def v_half_slots(device: int, devices: int) -> Slots:
    """The same in V-Half's block."""
    d, p = device, devices
    late = 3 if p % 2 == 0 else 0
    return 2 * d, 3 * p - 2 - d, 3 * p + late + 2 * d - 1, 6 * p + late - d - 2


def v_min(problem: ScheduleProblem) -> Schedule:
    """V-Min: at most (p + 4) // 3 microbatches' worth on any device.

    Raises:
        RequestError: other than two stages a device.
    """
    p = problem.devices
    return _build(problem, "v-min", [v_min_slots(d, p) for d in range(p)], (p + 4) // 3)


def v_half(problem: ScheduleProblem) -> Schedule:
    """V-Half: at most (p + 2) // 2 microbatches' worth on any device.

    Raises:
        RequestError: other than two stages a device.
    """
    p = problem.devices
    return _build(problem, "v-half", [v_half_slots(d, p) for d in range(p)], (p + 2) // 2)


def _build(problem: ScheduleProblem, name: str, block: list[Slots], peak: int) -> Schedule:
    if problem.chunks != 2:
        raise RequestError(f"{name} with {problem.chunks} chunks: it folds the model once; give 2 chunks")
    last = 2 * problem.devices - 1
    rows = [_row(slots, device, last - device, problem.microbatches) for device, slots in enumerate(block)]
    placement = folded_placement(problem.devices, 2)
    full = fill_weights(problem, placement, rows, [2 * peak] * problem.devices)
    return Schedule(name, placement, problem.microbatches, full)


def _row(slots: Slots, first: int, second: int, count: int) -> list[Action]:
    """F and I of one device, by slot."""
    passes = zip(slots, ((first, Kind.F), (second, Kind.F), (second, Kind.I), (first, Kind.I)), strict=True)
    due = sorted(
        (slot + PERIOD * microbatch, order, Action(stage, kind, microbatch))
        for order, (slot, (stage, kind)) in enumerate(passes)
        for microbatch in range(count)
    )
    return [action for _, _, action in due]


V_MIN = ScheduleFamily(
    "v-min", v_min, "folded, a third of 1F1B's memory (Controllable Memory)", split_backward=True, chunks=(2,),
    usual_chunks=2, placement=folded_placement,
)  # fmt: skip
V_HALF = ScheduleFamily(
    "v-half", v_half, "folded, half of 1F1B's memory (Controllable Memory)", split_backward=True, chunks=(2,),
    usual_chunks=2, placement=folded_placement,
)  # fmt: skip
