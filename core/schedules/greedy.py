"""A run through time that decides what a device does next: the heuristic behind ZB-1p and ZB-2p.

A free device runs the I that is there; where the next F would not fit, W; else F; and W where it would idle. Two
numbers bend these rules, both shares of an action's time (Zero Bubble, arXiv 2401.10241, section 3.1, has switches for
the same questions):

- ``overrun``: in the warm-up an F may end that much after the first I could have begun;
- ``squeeze``: W may run over the end of a gap by that much.
"""

from heapq import heappop, heappush

from attrs import define, field

from ..actions import Kind
from .problem import ScheduleProblem
from .scored import costs_of

_ROUNDING = 1e-9


@define
class _Device:
    """One device's stage: its costs and how far it has come.

    Args:
        forward_s, input_s, weight_s: times of F, I and W.
        need, kept: what F reserves, and what is held after I.
        limit: what may be held.
        first_input_s: when its first I can begin at the earliest.
    """

    forward_s: float
    input_s: float
    weight_s: float
    need: float
    kept: float
    limit: float
    first_input_s: float = 0.0
    held: float = 0.0
    free_s: float = 0.0
    weights: int = 0
    forward_ends: list[float] = field(factory=list)
    input_ends: list[float] = field(factory=list)
    order: list[Kind] = field(factory=list)

    def full(self) -> bool:
        """Whether the next F would hold too much."""
        return self.held + self.need > self.limit * (1 + _ROUNDING)


class GreedyRun:
    """One run.

    Args:
        problem: one stage a device.
        limits: of the memory of every device; each holds one microbatch at least.
        overrun, squeeze: see above.
    """

    def __init__(self, problem: ScheduleProblem, limits: list[float], overrun: float, squeeze: float) -> None:
        self._count, self._hop, self._overrun, self._squeeze = problem.microbatches, problem.hop_s, overrun, squeeze
        self._devices: list[_Device] = []
        for cost, limit in zip(costs_of(problem), limits, strict=True):
            times = cost.forward_s, cost.backward_input_s, cost.backward_weight_s
            self._devices.append(_Device(*times, cost.reserved_bytes, cost.kept_bytes, limit))
        at = sum(device.forward_s + self._hop for device in self._devices) - self._hop
        for device in reversed(self._devices):
            device.first_input_s = at
            at += device.input_s + self._hop
        self._events = [(0.0, number) for number in range(len(self._devices))]

    def kinds(self) -> tuple[tuple[Kind, ...], ...]:
        """What every device does, in order: the n-th F is that of microbatch n, and so are I and W."""
        while self._events:
            now, number = heappop(self._events)
            if now >= self._devices[number].free_s:
                self._decide(number, now)
        return tuple(tuple(device.order) for device in self._devices)

    def _decide(self, number: int, now: float) -> None:
        device = self._devices[number]
        forward, backward = self._forward_at(number, now), self._input_at(number)
        pending = device.weights < len(device.input_ends)
        more = len(device.forward_ends) < self._count
        if backward is not None and backward <= now + _ROUNDING:
            self._input(number, now)
        elif pending and more and device.full():
            self._weight(number, now)
        elif forward is not None and forward <= now + _ROUNDING:
            self._forward(number, now)
        else:
            arrivals = [at for at in (forward, backward) if at is not None]
            room = min(arrivals) - now if arrivals else float("inf")
            if pending and room >= device.weight_s * (1 - self._squeeze) - _ROUNDING:
                self._weight(number, now)
            elif arrivals:
                heappush(self._events, (min(arrivals), number))

    def _forward_at(self, number: int, now: float) -> float | None:
        """When the next F could begin; None where that is not known or it must not."""
        device, microbatch = self._devices[number], len(self._devices[number].forward_ends)
        if microbatch == self._count or device.full():
            return None
        at = 0.0
        if number > 0:
            before = self._devices[number - 1].forward_ends
            if microbatch >= len(before):
                return None
            at = before[microbatch] + self._hop
        late = max(at, now) + device.forward_s > device.first_input_s + self._overrun * device.forward_s + _ROUNDING
        return None if late and microbatch > 0 and not device.input_ends else at

    def _input_at(self, number: int) -> float | None:
        device, microbatch = self._devices[number], len(self._devices[number].input_ends)
        if microbatch >= len(device.forward_ends):
            return None
        if number + 1 == len(self._devices):
            return 0.0
        after = self._devices[number + 1].input_ends
        return after[microbatch] + self._hop if microbatch < len(after) else None

    def _forward(self, number: int, now: float) -> None:
        device = self._devices[number]
        device.held += device.need
        device.forward_ends.append(now + device.forward_s)
        self._ran(number, Kind.F, now + device.forward_s, number + 1)

    def _input(self, number: int, now: float) -> None:
        device = self._devices[number]
        device.held += device.kept - device.need
        device.input_ends.append(now + device.input_s)
        self._ran(number, Kind.I, now + device.input_s, number - 1)

    def _weight(self, number: int, now: float) -> None:
        device = self._devices[number]
        device.held -= device.kept
        device.weights += 1
        self._ran(number, Kind.W, now + device.weight_s, None)

    def _ran(self, number: int, kind: Kind, end: float, reader: int | None) -> None:
        device = self._devices[number]
        device.order.append(kind)
        device.free_s = end
        heappush(self._events, (end, number))
        if reader is not None and 0 <= reader < len(self._devices):
            heappush(self._events, (end + self._hop, reader))
