"""Placing W in the idle time of an order of F and I, delayed for as long as memory allows."""

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from ...actions import Action, Kind
from ...plan.memory import reserving_bytes
from ..problem import ScheduleProblem, source_of
from ..scored import ROUNDING, costs_of

_Done = tuple[int, Kind, int | None]


def fill_weights(
    problem: ScheduleProblem,
    placement: Sequence[int],
    rows: Sequence[Sequence[Action]],
    limits: Sequence[int],
    *,
    first_fits: float = 1.0,
) -> tuple[tuple[Action, ...], ...]:
    """Orders of F and I with W placed by list scheduling, like ZB-1p's heuristic (Zero Bubble, section 3.1).

    A device runs its oldest pending W if its next F would exceed the memory limit, or if W fits in the time until the
    inputs of its next action arrive. The remaining W are last.

    Args:
        problem: costs and delays.
        placement: device of every stage.
        rows: per device F and I in order, free of deadlock.
        limits: per device, how many saved (stage, microbatch) pairs it may hold. In bytes: the memory of ``rows`` with
            every W directly after I, and the mean of its stages for each further pair.
        first_fits: share of a W's time that must be idle on the first device; below 1 it then ends later.
    """
    costs = costs_of(problem)
    changes = [reserving_bytes(cost) for cost in costs]
    need = [change[Kind.F] for change in changes]
    most = [_limit(row, limit, need) for row, limit in zip(rows, limits, strict=True)]
    orders: list[list[Action]] = [[] for _ in rows]
    waiting: list[deque[Action]] = [deque() for _ in rows]
    held, place = [0.0] * len(rows), [0] * len(rows)
    ends: dict[_Done, float] = {}
    blocked: dict[_Done, tuple[float, int]] = {}  # action → time and device that waits for its result
    clocks = [(0.0, device) for device in range(len(rows))]
    while clocks:
        now, device = heappop(clocks)
        order, weights = orders[device], waiting[device]
        if place[device] == len(rows[device]):
            order += weights
            continue
        action = rows[device][place[device]]
        cost = costs[action.stage]
        stage = source_of(action.kind, action.stage, len(placement))
        source = None if stage is None else (stage, action.kind, action.microbatch)
        arrival = 0.0 if source is None else ends.get(source)
        if arrival is not None and source is not None and placement[source[0]] != device:
            arrival += problem.hop_s
        fits = first_fits if device == 0 else 1.0
        full = action.kind is Kind.F and held[device] + need[action.stage] > most[device]
        if weights and (
            full or arrival is None or _enough(arrival - now, fits * costs[weights[0].stage].backward_weight_s)
        ):
            work = weights.popleft()
            order.append(work)
            held[device] += changes[work.stage][Kind.W]
            heappush(clocks, (now + costs[work.stage].backward_weight_s, device))
        elif arrival is None:
            assert source is not None
            blocked[source] = now, device
        else:
            order.append(action)
            place[device] += 1
            held[device] += changes[action.stage][action.kind]
            if action.kind is Kind.I:
                weights.append(Action(action.stage, Kind.W, action.microbatch))
            end = max(now, arrival) + (cost.forward_s if action.kind is Kind.F else cost.backward_input_s)
            done = action.stage, action.kind, action.microbatch
            ends[done] = end
            heappush(clocks, (end, device))
            if done in blocked:
                heappush(clocks, blocked.pop(done))
    return tuple(map(tuple, orders))


def _limit(row: Sequence[Action], pairs: int, need: Sequence[float]) -> float:
    """Bytes that a device may hold, at least those that its row holds."""
    held, most, count, fewest = 0.0, 0.0, 0, 0
    for action in row:
        sign = 1 if action.kind is Kind.F else -1
        held, count = held + sign * need[action.stage], count + sign
        most, fewest = max(most, held), max(fewest, count)
    own = {action.stage for action in row}
    mean = sum(need[stage] for stage in own) / max(len(own), 1)
    return (most + max(pairs - fewest, 0) * mean) * (1 + ROUNDING)


def _enough(idle: float, time: float) -> bool:
    """Whether W fits, up to rounding."""
    return idle > 0 and idle >= time * (1 - ROUNDING)
