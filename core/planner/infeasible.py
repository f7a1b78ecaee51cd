"""When nothing fits: what a device would hold, and the smallest changes with which a plan does fit.

A change is never guessed: each comes with the plan that was found with it, within a bounded number of further searches.
"""

from collections.abc import Callable, Sequence

import numpy
from attrs import evolve, frozen

from ..actions import Action
from ..cluster import Cluster
from ..errors import InfeasibleError
from ..graph import OpGraph
from ..plan import Plan
from ..residency import STATE_KINDS, Timeline
from .altered import enlarged, smaller
from .score import Oracle

RECOMPUTE = "recompute"
MORE_DEVICES = "more devices"
SMALLER_MICROBATCHES = "smaller microbatches"
MORE_MEMORY = "more memory"
OFFLOAD = "offload"

MOST_DEVICES = 8
"""How many times the devices that there are, at most, are tried."""
SMALLEST_MICROBATCH = 16
"""The part of a microbatch, at least, that is tried."""
NARROWED = 0.01
"""Share of its memory to which the memory that a device would need is narrowed down."""


class NothingFits(InfeasibleError):
    """No plan was found that every device has the memory for.

    Args:
        message: one line.
        closest: the plan that exceeds the limits least, with its prediction.
        limits: bytes that each device may hold.
    """

    def __init__(self, message: str, closest: Plan, limits: Sequence[float]) -> None:
        super().__init__(message)
        self.closest = closest
        self.limits = tuple(limits)


@frozen
class Change:
    """A change with which a plan fits.

    Args:
        what: one of this module's names.
        value: how many devices, microbatches a step, or stages that recompute; bytes more for each device; bytes to
            offload over all devices.
        found: the plan that fits with it.
    """

    what: str
    value: float
    found: Plan


Replan = Callable[[OpGraph, Cluster, int, float], Plan | None]
"""A plan for that graph, cluster and number of microbatches, each device holding at most so many bytes more than its
limit, which fits; or None where none was found."""


def excess(plan: Plan, limits: Sequence[float]) -> tuple[float, ...]:
    """Bytes that each device lacks for a plan; 0 where it has enough."""
    assert plan.prediction is not None
    peaks = plan.prediction.peak_memory_bytes
    return tuple(max(peak - limit, 0.0) for peak, limit in zip(peaks, limits, strict=True))


Tried = Callable[[OpGraph, Cluster, int], Plan | None]
"""The same within the limits."""


def closest(nothing: NothingFits, graph: OpGraph, replan: Replan) -> Plan:
    """The plan that asks for the least more memory on its fullest device: by searches with more, narrowed down.

    Args:
        nothing: what was found.
        graph: what was planned.
        replan: searches for a plan that fits.
    """
    found = nothing.closest
    assert found.prediction is not None
    cluster, microbatches, limit = found.prediction.cluster, found.microbatches, max(nothing.limits)
    low, high = 0.0, max(excess(found, nothing.limits))
    while high - low > NARROWED * limit:
        middle = (low + high) / 2
        better = None
        if may_fit(graph, len(cluster.devices), limit + middle):
            better = replan(graph, cluster, microbatches, middle)
        if better is None:
            low = middle
        else:
            found, high = better, min(max(excess(better, nothing.limits)), middle)
    return found


def smallest_changes(
    plan: Plan,
    limits: Sequence[float],
    graph: OpGraph,
    timelines: Sequence[Timeline],
    replan: Replan,
    *,
    oracle: Oracle,
    recomputing: Callable[[], Plan | None] = lambda: None,
    rows: int | None = None,
) -> tuple[Change, ...]:
    """The smallest of each kind of change that makes a plan fit; kinds that do not help are left out.

    Args:
        plan: the one that comes closest, with its prediction.
        limits: bytes that each device may hold.
        graph: what was planned.
        timelines: of the plan's memory, by device.
        replan: searches for a plan that fits.
        oracle: scores a plan.
        recomputing: searches for a plan that fits, some of whose stages recompute.
        rows: of the batch of one step, where it is known: a microbatch has at least one.
    """
    assert plan.prediction is not None
    cluster, limit = plan.prediction.cluster, max(limits)

    def tried(graph: OpGraph, cluster: Cluster, microbatches: int) -> Plan | None:
        fits = may_fit(graph, len(cluster.devices), limit)
        return replan(graph, cluster, microbatches, 0.0) if fits else None

    changes = (
        _smaller_microbatches(graph, cluster, plan.microbatches, tried, rows),
        _recompute(plan, limits, oracle) or _searched_recompute(recomputing()),
        _offload(plan, limits, timelines),
        Change(MORE_MEMORY, max(excess(plan, limits)), plan),
        _more_devices(graph, cluster, plan.microbatches, tried),
    )
    return tuple(change for change in changes if change is not None)


def may_fit(graph: OpGraph, devices: int, limit: float) -> bool:
    """Whether the graph may fit at all: the state of all operators together, and the state of each alone."""
    state = sum(node.state_bytes for node in graph.nodes)
    alone = max(node.state_bytes for node in graph.nodes)
    return state <= devices * limit and alone <= limit


def _recompute(plan: Plan, limits: Sequence[float], oracle: Oracle) -> Change | None:
    """The fewest stages of devices that lack memory, those first that save most; None where all of them are too few."""
    assert plan.prediction is not None
    costs = plan.prediction.costs
    lacking = {device for device, lack in enumerate(excess(plan, limits)) if lack}
    held = [stage.index for stage in plan.stages if stage.device in lacking and not _recomputes(plan, stage.index)]
    held.sort(key=lambda stage: (costs[stage].input_bytes - costs[stage].saved_bytes, stage))
    for count in range(1, len(held) + 1):
        chosen = tuple(sorted((*plan.memory.recompute, *held[:count])))
        changed = evolve(plan, memory=evolve(plan.memory, recompute=chosen))
        score = oracle(changed, costs, plan.prediction.cluster)
        prediction = evolve(
            plan.prediction,
            step_s=score.step_s,
            peak_memory_bytes=score.peak_memory_bytes,
            peak_saved_bytes=score.peak_saved_bytes,
            bubble_ratio=score.bubble_ratio,
        )
        changed = evolve(changed, prediction=prediction)
        if not any(excess(changed, limits)):
            return Change(RECOMPUTE, count, changed)
    return None


def _searched_recompute(found: Plan | None) -> Change | None:
    return None if found is None else Change(RECOMPUTE, len(found.memory.recompute), found)


def _recomputes(plan: Plan, stage: int) -> bool:
    return stage in plan.memory.recompute


def _more_devices(graph: OpGraph, cluster: Cluster, microbatches: int, replan: Tried) -> Change | None:
    """By doubling, then by halving the gap."""
    low = len(cluster.devices)
    most = min(MOST_DEVICES * low, len(graph.nodes))
    found = None
    high = low
    while found is None and high < most:
        low, high = high, min(2 * high, most)
        found = replan(graph, enlarged(cluster, high), microbatches)
    if found is None:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        better = replan(graph, enlarged(cluster, middle), microbatches)
        if better is None:
            low = middle
        else:
            high, found = middle, better
    return Change(MORE_DEVICES, high, found)


def _smaller_microbatches(
    graph: OpGraph, cluster: Cluster, microbatches: int, replan: Tried, rows: int | None
) -> Change | None:
    """Twice as many microbatches of half the size, and so on."""
    parts = 2
    while parts <= SMALLEST_MICROBATCH and (rows is None or microbatches * parts <= rows):
        found = replan(smaller(graph, parts), cluster, microbatches * parts)
        if found is not None:
            return Change(SMALLER_MICROBATCHES, microbatches * parts, found)
        parts *= 2
    return None


def _offload(plan: Plan, limits: Sequence[float], timelines: Sequence[Timeline]) -> Change | None:
    """Saved tensors that would have to be with the host, where whatever is too much at any moment is such.

    One microbatch of the device's largest stage has to stay: the running action works on it.
    """
    assert plan.prediction is not None
    total = 0.0
    for device, (timeline, limit) in enumerate(zip(timelines, limits, strict=False)):
        over = sum(timeline.state) + timeline.moving[0] + timeline.moving[2] - limit
        stays = max((plan.prediction.costs[s.index].reserved_bytes for s in plan.stages_on(device)), default=0)
        if (over > numpy.maximum(timeline.moving[0] - stays, 0.0)).any():
            return None
        total += max(float(over.max()), 0.0)
    return Change(OFFLOAD, total, plan)


@frozen
class Holding:
    """What the device that lacks most holds at its peak, messages under way aside.

    Args:
        device: its number.
        action: that causes the peak.
        kinds: bytes by kind.
        limit: bytes that it may hold.
    """

    device: int
    action: Action | None
    kinds: dict[str, float]
    limit: float

    @property
    def bytes(self) -> float:
        """Everything together."""
        return sum(self.kinds.values())


def holding(plan: Plan, limits: Sequence[float], timelines: Sequence[Timeline]) -> Holding:
    """The device that lacks most.

    Args:
        plan: with its prediction.
        limits: bytes that each device may hold.
        timelines: of the plan's memory, by device.
    """
    lacks = excess(plan, limits)
    device = lacks.index(max(lacks))
    timeline = timelines[device]
    worst = int((timeline.moving[0] + timeline.moving[2]).argmax())
    kinds = dict(zip(STATE_KINDS, timeline.state, strict=True))
    kinds |= {"saved": float(timeline.moving[0, worst]), "workspace": float(timeline.moving[2, worst])}
    action = timeline.actions[int(timeline.operations[worst])] if timeline.actions else None
    return Holding(device, action, kinds, limits[device])
