"""DualPipe-V: DualPipe cut in half, on a model folded over the devices.

DualPipe is from DeepSeek-V3 (arXiv 2412.19437, section 3.2), and the cut in half from Qi et al. 2025.

Device d of p holds stages d and 2p − 1 − d, here a and b. It pairs a forward with a backward, so that the communication
of one can overlap with the compute of the other. It splits backwards only where it would idle in warm-up and
cool-down::

    warm-up     2(p − 1 − d) × Fa      (d + 1) × (Fa Fb)      (p − 1 − d) × (Ib Wb Fb)
    steady      (m − 2p + d + 1) × (Fa Bb Fb Ba)
    cool-down   (p − 1 − d) × (Bb Fb Ba)      (d + 1) × (Bb Ba), the second half split, W delayed
                (p − 1 − d) × (W Ia)      the remaining W

With fewer than 2p microbatches, the missing ones are omitted.
"""

from collections import deque
from collections.abc import Iterator

from ..actions import Action, Kind
from .construction.order import existing
from .problem import Schedule, ScheduleFamily, ScheduleProblem, folded_placement, refuse_unfolded


def dualpipe_v(problem: ScheduleProblem) -> Schedule:
    """DualPipe-V.

    Raises:
        RequestError: not two stages per device.
    """
    refuse_unfolded("dualpipe-v", problem.chunks)
    p, count = problem.devices, problem.microbatches
    orders = tuple(existing(_Row(p, device, max(count, 2 * p)).actions(), count) for device in range(p))
    return Schedule("dualpipe-v", folded_placement(p, 2), count, orders)


class _Row:
    """One device's order, for at least 2p microbatches."""

    def __init__(self, devices: int, device: int, count: int) -> None:
        self._devices, self._device, self._count = devices, device, count
        self._first, self._second = device, 2 * devices - 1 - device
        self._done = {(stage, way): 0 for stage in (self._first, self._second) for way in "FB"}
        self._waiting: deque[Action] = deque()

    def _forward(self, stage: int) -> Action:
        self._done[stage, "F"] += 1
        return Action(stage, Kind.F, self._done[stage, "F"] - 1)

    def _backward(self, stage: int, kind: Kind = Kind.B) -> Action:
        """B; or I, whose W then waits."""
        microbatch = self._done[stage, "B"]
        self._done[stage, "B"] += 1
        if kind is Kind.I:
            self._waiting.append(Action(stage, Kind.W, microbatch))
        return Action(stage, kind, microbatch)

    def actions(self) -> Iterator[Action]:
        """The device's actions in order."""
        first, second, left = self._first, self._second, self._devices - 1 - self._device
        for _ in range(2 * left):
            yield self._forward(first)
        for _ in range(self._device + 1):
            yield self._forward(first)
            yield self._forward(second)
        for _ in range(left):
            yield self._backward(second, Kind.I)
            yield self._waiting.popleft()
            yield self._forward(second)
        for _ in range(self._count - 2 * self._devices + self._device + 1):
            yield self._forward(first)
            yield self._backward(second)
            yield self._forward(second)
            yield self._backward(first)
        for _ in range(left):
            yield self._backward(second)
            yield self._forward(second)
            yield self._backward(first)
        yield from self._cool_down(left)

    def _cool_down(self, left: int) -> Iterator[Action]:
        turns = self._device + 1
        for turn in range(turns):
            whole = turn < turns // 2
            yield self._backward(self._second, Kind.B if whole or (turn == turns // 2 and turns % 2) else Kind.I)
            yield self._backward(self._first, Kind.B if whole else Kind.I)
        for _ in range(left):
            if self._waiting:
                yield self._waiting.popleft()
            yield self._backward(self._first, Kind.I)
        yield from self._waiting


FAMILY = ScheduleFamily(
    "dualpipe-v", dualpipe_v, "DualPipe cut in half, forwards paired with backwards (DeepSeek-V3)",
    split_backward=True, chunks=(2,), usual_chunks=2, placement=folded_placement,
)  # fmt: skip
