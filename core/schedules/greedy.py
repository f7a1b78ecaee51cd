"""Greedy list scheduling: the heuristic of ZB-1p and ZB-2p.

A free device runs an available I; else W if the next F would not fit in memory; else F; and W where it would idle. Two
parameters relax these rules, both shares of an action's time (Zero Bubble, arXiv 2401.10241, section 3.1, has switches
for the same):

- ``overrun``: in the warm-up an F may end that much after the first I could have begun;
- ``squeeze``: W may run over the end of a gap by that much.
"""

from heapq import heappop, heappush

from attrs import define, field

from ..actions import Kind
from ..evaluate.coding import FORWARD, INPUT, KIND, WEIGHT
from ..plan.memory import reserving_bytes
from .problem import ScheduleProblem, source_of
from .scored import costs_of

_ROUNDING = 1e-9


@define
class _Device:
    """One device's stage: its costs and progress.

    Args:
        times, changes: of F, I and W: duration, and change of the reserved memory.
        limit: of the reserved memory.
        first_input_s: earliest start of its first I.
        source: per kind the device that it reads from, if any.
        ends: of its F, I and W so far.
        order: codes of the kinds so far.
    """

    times: tuple[float, float, float]
    changes: tuple[float, float, float]
    limit: float
    source: tuple[int | None, int | None, None]
    first_input_s: float = 0.0
    held: float = 0.0
    free_s: float = 0.0
    ends: tuple[list[float], list[float], list[float]] = field(factory=lambda: ([], [], []))
    order: list[int] = field(factory=list)

    def full(self) -> bool:
        """Whether the next F would exceed the memory limit."""
        return self.held + self.changes[FORWARD] > self.limit * (1 + _ROUNDING)


class GreedyRun:
    """One run.

    Args:
        problem: with one stage per device.
        limits: memory limit of every device; each fits at least one microbatch.
        overrun, squeeze: see the module's docstring.
    """

    def __init__(self, problem: ScheduleProblem, limits: list[float], overrun: float, squeeze: float) -> None:
        self._count, self._hop, self._overrun, self._squeeze = problem.microbatches, problem.hop_s, overrun, squeeze
        self._devices: list[_Device] = []
        stages = problem.stages
        for stage, (cost, limit) in enumerate(zip(costs_of(problem), limits, strict=True)):
            times, changes = (cost.forward_s, cost.backward_input_s, cost.backward_weight_s), reserving_bytes(cost)
            source = source_of(Kind.F, stage, stages), source_of(Kind.I, stage, stages), None
            held = changes[Kind.F], changes[Kind.I], changes[Kind.W]
            self._devices.append(_Device(times, held, limit, source))
        at = sum(device.times[FORWARD] + self._hop for device in self._devices) - self._hop
        for device in reversed(self._devices):
            device.first_input_s = at
            at += device.times[INPUT] + self._hop
        self._events = [(0.0, number) for number in range(len(self._devices))]

    def kinds(self) -> tuple[tuple[Kind, ...], ...]:
        """Kinds of every device's actions, in order: the n-th F, I and W are those of microbatch n."""
        while self._events:
            now, number = heappop(self._events)
            if now >= self._devices[number].free_s:
                self._decide(number, now)
        return tuple(tuple(KIND[code] for code in device.order) for device in self._devices)

    def _decide(self, number: int, now: float) -> None:
        device = self._devices[number]
        backward = self._arrival(device, INPUT)
        if backward is not None and backward <= now + _ROUNDING:
            self._run(number, INPUT, now)
            return
        forwards, inputs, weights = device.ends
        pending = len(weights) < len(inputs)
        if pending and len(forwards) < self._count and device.full():
            self._run(number, WEIGHT, now)
            return
        forward = self._forward_at(device, now)
        if forward is not None and forward <= now + _ROUNDING:
            self._run(number, FORWARD, now)
        else:
            arrivals = [at for at in (forward, backward) if at is not None]
            gap = min(arrivals) - now if arrivals else float("inf")
            if pending and gap >= device.times[WEIGHT] * (1 - self._squeeze) - _ROUNDING:
                self._run(number, WEIGHT, now)
            elif arrivals:
                heappush(self._events, (min(arrivals), number))

    def _forward_at(self, device: _Device, now: float) -> float | None:
        """When the next F could begin; None if not known or not allowed."""
        microbatch, time = len(device.ends[FORWARD]), device.times[FORWARD]
        if microbatch == self._count or device.full():
            return None
        at = self._arrival(device, FORWARD)
        if at is None:
            return None
        late = max(at, now) + time > device.first_input_s + self._overrun * time + _ROUNDING
        return None if late and microbatch > 0 and not device.ends[INPUT] else at

    def _arrival(self, device: _Device, kind: int) -> float | None:
        """When the input of the next F or I arrives; None if not known."""
        microbatch = len(device.ends[kind])
        if kind == INPUT and microbatch >= len(device.ends[FORWARD]):
            return None
        source = device.source[kind]
        if source is None:
            return 0.0
        ends = self._devices[source].ends[kind]
        return ends[microbatch] + self._hop if microbatch < len(ends) else None

    def _run(self, number: int, kind: int, now: float) -> None:
        device = self._devices[number]
        device.held += device.changes[kind]
        device.free_s = end = now + device.times[kind]
        device.ends[kind].append(end)
        device.order.append(kind)
        heappush(self._events, (end, number))
        reader = number + 1 if kind == FORWARD else number - 1
        if kind != WEIGHT and 0 <= reader < len(self._devices):
            heappush(self._events, (end + self._hop, reader))
