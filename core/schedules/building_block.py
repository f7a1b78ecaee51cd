"""Building blocks: one microbatch's passes in slots, repeated (Controllable Memory, arXiv 2405.15362, section 3).

1. Repeat: the slot of a pass is its slot in the block plus one period for each microbatch. The lifespan of a stage's
   block, from F to the end of its backward, divided by the period is the number of microbatches that it holds: the
   block fixes the memory before anything is scheduled.
2. Squeeze: only the order counts, so slots in which a device would idle are removed.
3. Re-order: slots become priorities. List scheduling runs the available action with the earliest slot, unless it would
   hold more than the block. So warm-up and cool-down have fewer gaps, and W fills the remaining idle time.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from ..documents import read_document
from ..errors import RequestError
from ..files.limits import check_count
from .problem import Schedule, ScheduleFamily, ScheduleProblem
from .scored import ROUNDING

if TYPE_CHECKING:
    from ..timing.coding import Floats
    from .construction.list_scheduler import Instance

FORMAT = "panpipe.block/1"
WEIGHT_DELAYS = (1.0, 3.3)
"""Periods after its I at which a W is due."""
PATIENCE = ((0.0, 0.0, 0.0), (0.5, 0.5, 0.5), (0.0, 0.0, 1.0))
"""How long a device may wait for a better action before it runs F, I or W: see `decode`."""
SLACK = (2.0, 4.0)
"""Slots by which a stage may hold a microbatch longer than in its block."""
MOST_SLOT = 10**9
"""Largest slot and period: slots of all microbatches are then exact."""
SECOND_ROUND = 3
"""How many of the best priorities of the first run are tried with every patience and slack."""


@frozen
class Block:
    """The slots of one microbatch's passes.

    Args:
        placement: device of every stage.
        period: slots between one microbatch and the next.
        forward: slot of F on every stage.
        input: slot of I, or of B where ``weight`` is empty and the backward is not split.
        weight: slot of W, or empty: then W goes where a device would idle.
        whole_backward: the backward is not split.

    Raises:
        RequestError: the lists have different lengths, or a pass is not after the passes that it reads.
    """

    placement: tuple[int, ...]
    period: int
    forward: tuple[int, ...]
    input: tuple[int, ...]
    weight: tuple[int, ...] = ()
    whole_backward: bool = False

    def __attrs_post_init__(self) -> None:
        stages = len(self.placement)
        counts = Counter(self.placement)
        # The numbers of the devices are 0, 1, 2, … without a gap.
        if not counts or min(counts) < 0 or max(counts) + 1 != len(counts):
            raise RequestError(
                f"the placement {_listed(self.placement)} is not one device for every stage: number devices from 0, "
                "and give each of them a stage"
            )
        if len(set(counts.values())) > 1:
            raise RequestError(f"the placement {_listed(self.placement)} gives devices different numbers of stages")
        for name, slots in (("forward", self.forward), ("input", self.input), ("weight", self.weight)):
            if len(slots) != stages and (slots or name != "weight"):
                raise RequestError(f"{name} has {len(slots)} slots and there are {stages} stages: give one for each")
        check_count("the period", self.period, MOST_SLOT, least=1)
        for slot in (*self.forward, *self.input, *self.weight):
            check_count("a slot", slot, MOST_SLOT, least=-MOST_SLOT)
        if self.weight and self.whole_backward:
            raise RequestError("the block has slots of W and a whole backward: leave one of them out")
        self._check_order()

    def _check_order(self) -> None:
        last = len(self.placement) - 1
        for stage in range(last + 1):
            reads = [("I", self.input[stage], "F", self.forward[stage])]
            if stage > 0:
                reads.append(("F", self.forward[stage], f"stage {stage - 1}'s F", self.forward[stage - 1]))
            if stage < last:
                reads.append(("I", self.input[stage], f"stage {stage + 1}'s I", self.input[stage + 1]))
            if self.weight:
                reads.append(("W", self.weight[stage], "I", self.input[stage]))
            for name, slot, source, before in reads:
                if slot <= before:
                    raise RequestError(
                        f"stage {stage}: {name} is in slot {slot} and reads what {source} computes in slot {before}: "
                        f"give it slot {before + 1} or a later one"
                    )

    def check_slots(self) -> None:
        """Refuse two passes of a device in one slot: when repeated, they would overlap.

        Raises:
            RequestError: two passes share a slot.
        """
        taken: dict[tuple[int, int], str] = {}
        for stage, device in enumerate(self.placement):
            for name, slots in (("F", self.forward), ("I", self.input), ("W", self.weight)):
                if slots:
                    place = device, slots[stage] % self.period
                    mine = f"{name} of stage {stage}"
                    if place in taken:
                        raise RequestError(
                            f"device {device}: {taken[place]} and {mine} share slot {place[1]} of the period "
                            f"{self.period}: move one of them"
                        )
                    taken[place] = mine

    @property
    def devices(self) -> int:
        """Number of devices."""
        return max(self.placement) + 1

    def held(self) -> tuple[int, ...]:
        """Per device, the most (stage, microbatch) pairs alive in a slot: from F through W, or I where W has none."""
        return tuple(round(most) for most in self.weighed([1.0] * len(self.placement)))

    def weighed(self, weights: Sequence[float]) -> tuple[float, ...]:
        """As `held`, with each pair counted by the weight of its stage."""
        ends = self.weight or self.input
        found = []
        for device in range(self.devices):
            own = [stage for stage, where in enumerate(self.placement) if where == device]
            # The number of live microbatches rises only where an F starts.
            alive = (
                sum(weights[s] * ((t - self.forward[s]) // self.period - (t - ends[s] - 1) // self.period) for s in own)
                for t in {self.forward[s] % self.period for s in own}
            )
            found.append(max(alive))
        return tuple(found)


def _listed(placement: Sequence[int]) -> str:
    """The devices of at most the first 20 stages."""
    return f"[{', '.join(map(str, placement[:20]))}{', …' if len(placement) > 20 else ''}]"


def read_block(path: Path | str) -> Block:
    """Read a block's file.

    Raises:
        RequestError: the file cannot be read, or is not a block.
    """
    return read_document(path, FORMAT, Block)


def building_block(problem: ScheduleProblem, *, block: Block | None = None) -> Schedule:
    """The schedule of a block that a user wrote.

    Args:
        problem: costs and delays, for the block's number of devices and chunks.

    Raises:
        RequestError: there is no block, two of its passes share a slot, or it is for other devices or chunks.
    """
    if block is None:
        raise RequestError("building-block needs a block: write one to a file and give --block FILE")
    block.check_slots()
    stages = len(block.placement)
    if (block.devices, stages) != (problem.devices, problem.stages):
        raise RequestError(
            f"the block is for {block.devices} devices with {stages // block.devices} stages each and the schedule for "
            f"{problem.devices} with {problem.chunks}: give as many devices and chunks as the block has"
        )
    return repeat(problem, "building-block", [block], block.held())


def repeat(problem: ScheduleProblem, name: str, blocks: Sequence[Block], held: Sequence[int]) -> Schedule:
    """The fastest schedule that follows from the blocks by repeating, squeezing, re-ordering and polishing.

    Args:
        blocks: variants of one block, on one placement; the first is the block itself.
        held: per device, the (stage, microbatch) pairs that it may hold.
    """
    import numpy as np  # here: numpy and compiled code take longer to load than most schedules to build

    from ..timing.coding import INFINITY
    from .construction.list_scheduler import TAIL, Listed, Priorities, instance
    from .construction.polish import polish

    task = instance(problem, blocks[0].placement)
    # In bytes: the memory of the block, and the mean of a device's stages for each pair by which ``held`` differs.
    share = np.array([task.need[own].mean() for own in task.stages_on])
    most = np.array(blocks[0].weighed(task.need.tolist())) + (np.array(held) - np.array(blocks[0].held())) * share
    limits = np.maximum(most, [task.need[own].sum() for own in task.stages_on]) * (1 + ROUNDING)
    task = evolve(task, limits=limits)
    fused = np.full(len(task.placement), blocks[0].whole_backward)
    best: Listed | None = None

    def run(
        priority: "tuple[Block, Floats, Floats]", slack: float, patience: tuple[float, ...], *, strict: bool = False
    ) -> tuple[float, float]:
        nonlocal best
        block, keys, life = priority
        caps = np.maximum(1, (life + slack) // block.period + 1).astype(np.int64)
        if strict:  # W where the device would idle
            caps[:], keys = problem.microbatches, np.stack([keys[0], keys[1], keys[2] + keys.max()])
        stop = INFINITY if best is None else best.value[0] * (1 + TAIL)
        found = task.listed(Priorities(keys, np.array(patience), caps, fused, strict=strict), stop)
        if best is None or found.value < best.value:
            best = found
        return found.value

    priorities = [
        (block, *_priorities(block, task, in_time, delay))
        for block, in_time, delay in itertools.product(blocks, (False, True), WEIGHT_DELAYS)
    ]
    ways = list(itertools.product(SLACK, PATIENCE))
    for priority in sorted(priorities, key=lambda priority: run(priority, *ways[0]))[:SECOND_ROUND]:
        for way in ways[1:]:
            run(priority, *way)
    if not blocks[0].weight:
        run(priorities[0], 0.0, (0.0, 0.0, 1.0), strict=True)
    assert best is not None
    return polish(problem, task.schedule(name, best.orders, best.lengths))


def _priorities(block: Block, task: "Instance", in_time: bool, delay: float) -> "tuple[Floats, Floats]":
    """Keys of F, I and W of every stage and microbatch, and how many slots lie between a stage's F and I.

    Args:
        in_time: whether slots are times: an equal part of a microbatch's compute time each, with the hop delays added.
        delay: periods after its I at which a W is due, if the block does not define it.
    """
    import numpy as np

    forward, back = np.array(block.forward, dtype=float), np.array(block.input, dtype=float)
    life = np.array(block.weight or block.input, dtype=float) - forward
    weight = np.array(block.weight, dtype=float) if block.weight else back + delay * block.period
    period = float(block.period)
    if in_time:
        work = float(task.times.sum(axis=0)[task.stages_on].sum(axis=1).max())
        slot, period = work / block.period, work
        out = np.cumsum(task.hops)
        home = 2 * out[-1] - out
        forward, back, weight = forward * slot + out, back * slot + home, weight * slot + home
    turn = np.arange(task.problem.microbatches) * period
    return np.stack([forward[:, None] + turn, back[:, None] + turn, weight[:, None] + turn]), life


def _no_candidates(problem: ScheduleProblem) -> Iterable[dict[str, object]]:
    return ()


FAMILY = ScheduleFamily(
    "building-block", building_block, "a block of slots that you write, repeated (Controllable Memory)",
    split_backward=True, candidates=_no_candidates,
)  # fmt: skip
"""It has no candidates for a search, because only a user can give the block."""
