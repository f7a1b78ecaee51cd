"""V-Min, V-Half and 1F1B-V: building blocks for a model folded over the devices.

They are from Controllable Memory (arXiv 2405.15362).

Device d holds stages d and 2p − 1 − d. The sooner the backward of a stage follows its forward, the less memory it
holds: V-Min takes one slot per stage everywhere, V-Half two in the first half of the forward. 1F1B-V does not split the
backward, which takes two slots.
"""

from collections.abc import Callable

from .building_block import Block, repeat
from .problem import Builder, Schedule, ScheduleFamily, ScheduleProblem, folded_placement, refuse_unfolded

PERIOD = 6
"""Slots between one microbatch and the next: F, F, I, I, W and W of a device."""

Slots = tuple[int, int, int, int]
"""F on the first stage of a device, F and I on its second, I on its first."""


def v_min_slots(device: int, devices: int, later: int = 0) -> Slots:
    """V-Min's block; ``later`` delays both backwards."""
    d, p = device, devices
    late = later + (2 if p % 3 == 0 else 0)  # otherwise two passes of a device share a slot
    return d, 2 * p - 1 - d, 2 * p + late + d, 4 * p + late - 1 - d


def v_half_slots(device: int, devices: int, later: int = 0) -> Slots:
    """V-Half's block; ``later`` delays both backwards."""
    d, p = device, devices
    late = later + (3 if p % 2 == 0 else 0)
    return 2 * d, 3 * p - 2 - d, 3 * p + late + 2 * d - 1, 6 * p + late - d - 2


def one_f_one_b_v_slots(device: int, devices: int) -> Slots:
    """1F1B-V's block: one slot per stage forward, two backward."""
    d, p = device, devices
    return d, 2 * p - 1 - d, 2 * p + 2 * d, 6 * p - 2 - 2 * d


def v_min(problem: ScheduleProblem) -> Schedule:
    """V-Min: saved tensors of at most (p + 4) // 3 microbatches on any device.

    Raises:
        RequestError: not two stages per device.
    """
    return _build(problem, "v-min", v_min_slots, (0, 3), (problem.devices + 4) // 3)


def v_half(problem: ScheduleProblem) -> Schedule:
    """V-Half: saved tensors of at most (p + 2) // 2 microbatches on any device.

    Raises:
        RequestError: not two stages per device.
    """
    even = problem.devices % 2 == 0
    return _build(problem, "v-half", v_half_slots, (0, -2 if even else 1), (problem.devices + 2) // 2)


def one_f_one_b_v(problem: ScheduleProblem) -> Schedule:
    """1F1B-V: whole backwards, at most two thirds of 1F1B's microbatches on any device, rounded up.

    Raises:
        RequestError: not two stages per device.
    """
    refuse_unfolded("1f1b-v", problem.chunks)
    p = problem.devices
    block = _block([one_f_one_b_v_slots(d, p) for d in range(p)], whole_backward=True)
    return repeat(problem, "1f1b-v", [block], [2 * -(-2 * p // 3)] * p)


def _build(
    problem: ScheduleProblem, name: str, slots: Callable[[int, int, int], Slots], later: tuple[int, ...], most: int
) -> Schedule:
    refuse_unfolded(name, problem.chunks)
    p = problem.devices
    blocks = [_block([slots(d, p, delay) for d in range(p)]) for delay in later]
    first = min(2 * most, blocks[0].held()[0] + 1)  # with one pair that waits for its W
    return repeat(problem, name, blocks, [first] + [2 * most] * (p - 1))


def _block(slots: list[Slots], whole_backward: bool = False) -> Block:
    p = len(slots)
    forward, back = [0] * (2 * p), [0] * (2 * p)
    for d, (first_f, second_f, second_i, first_i) in enumerate(slots):
        forward[d], forward[2 * p - 1 - d] = first_f, second_f
        back[d], back[2 * p - 1 - d] = first_i, second_i
    return Block(folded_placement(p, 2), PERIOD, tuple(forward), tuple(back), whole_backward=whole_backward)


def _family(build: Builder, name: str, summary: str, split: bool = True) -> ScheduleFamily:
    return ScheduleFamily(
        name, build, f"{summary} (Controllable Memory)", split_backward=split, chunks=(2,), usual_chunks=2,
        placement=folded_placement,
    )  # fmt: skip


V_MIN = _family(v_min, "v-min", "folded, a third of 1F1B's memory")
V_HALF = _family(v_half, "v-half", "folded, half of 1F1B's memory")
ONE_F_ONE_B_V = _family(one_f_one_b_v, "1f1b-v", "folded, whole backwards, two thirds of 1F1B's memory", split=False)
