"""Where nothing fits: the smallest changes with which a plan does fit.

A change is never guessed: each comes with the plan that was found with it, by the very search that finds one for
whoever asks for that, within a bounded number of further searches.
"""

from collections.abc import Callable, Iterable, Sequence
from math import ceil, floor, log10

import numpy
from attrs import evolve, frozen

from ...cluster.mesh import least_by_position
from ...costs.graph import OpGraph
from ...plan.plan import Plan
from ...plan.residency import Timeline
from ..problem.score import Oracle, with_costs
from .infeasible import NothingFits, excess

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
DOUBLINGS = 12
"""How often it is doubled, at most, until a plan is found."""


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


@frozen
class Asked:
    """What is asked for in place of what does not fit.

    Args:
        devices: how many; None as many as there are.
        parts: a microbatch's parts that become microbatches themselves.
        extra_bytes: further memory of each device.
        recompute: whether stages may recompute, whatever was said before.
    """

    devices: int | None = None
    parts: int = 1
    extra_bytes: float = 0.0
    recompute: bool = False


Replan = Callable[[Asked], Plan | None]
"""A plan that fits what is asked for, by the beginning of the search that whoever asks for it gets; None where that
finds none."""


@frozen
class Problem:
    """What was planned and does not fit.

    Args:
        graph: with the costs of one microbatch.
        microbatches: of a step, over all replicas; None where their size is the search's choice.
        memory: bytes that each of the cluster's devices may hold.
        saves: whether no stage may recompute.
        rows: of the batch of one step, where it is known: a microbatch has at least one.
    """

    graph: OpGraph
    microbatches: int | None
    memory: Sequence[float]
    saves: bool = True
    rows: int | None = None

    @property
    def devices(self) -> int:
        """Of the cluster."""
        return len(self.memory)

    @property
    def limit(self) -> float:
        """Bytes that the device with most memory may hold."""
        return max(self.memory)

    def limits(self, plan: Plan) -> tuple[float, ...]:
        """Bytes that the device at each position of a plan may hold, in every replica."""
        return least_by_position(self.memory, plan.mesh.replicas)

    def may_fit(self, asked: Asked) -> bool:
        """Whether it may fit at all: the state of all operators together with what one microbatch saves between its
        last forward and its first backward, and the state of each alone."""
        nodes, limit, devices = self.graph.nodes, self.limit + asked.extra_bytes, asked.devices or self.devices
        state = sum(node.state_bytes for node in nodes)
        saved = sum(node.saved_bytes for node in nodes) / asked.parts if self.saves and not asked.recompute else 0
        return state + saved <= devices * limit and max(node.state_bytes for node in nodes) <= limit

    def only_possible(self, replan: Replan) -> Replan:
        """The search, which is spared what cannot fit."""
        return lambda asked: replan(asked) if self.may_fit(asked) else None


def _least(
    tried: Callable[[int], Plan | None], low: int, numbers: Iterable[int], near: float = 1.0
) -> tuple[int, Plan | None]:
    """The first of ascending numbers with which a plan is found, and then the least, by halving, up to ``near``.

    Args:
        tried: a number → a plan with it, or None.
        low: with which none is found.
        numbers: above it.
        near: how far from a number with which none is found the least may be; 1 is the very least.
    """
    high, found = low, None
    for number in numbers:
        high, found = number, tried(number)
        if found is not None:
            break
        low = number
    while found is not None and high - low > max(near, 1):
        middle = (low + high) // 2
        better = tried(middle)
        if better is None:
            low = middle
        else:
            high, found = middle, better
    return high, found


def more_memory(nothing: NothingFits, problem: Problem, replan: Replan) -> Change | None:
    """The least further memory of each device with which a plan was found: by searches, narrowed down to round numbers.

    Args:
        nothing: what was found.
        problem: what was planned.
        replan: searches for a plan that fits.
    """
    step = NARROWED * problem.limit
    unit = max(10.0 ** floor(log10(step)), 1.0)

    first = ceil(max(excess(nothing.closest, nothing.limits)) / unit)
    numbers = [first << doubling for doubling in range(DOUBLINGS)]
    ask = problem.only_possible(replan)
    units, found = _least(lambda number: ask(Asked(extra_bytes=number * unit)), 0, numbers, near=step / unit)
    return None if found is None else Change(MORE_MEMORY, units * unit, found)


def smallest_changes(
    nothing: NothingFits,
    problem: Problem,
    memory: Change | None,
    timelines: Sequence[Timeline],
    replan: Replan,
    *,
    oracle: Oracle,
) -> tuple[Change, ...]:
    """The smallest of each kind of change that makes a plan fit; kinds that do not help are left out.

    Args:
        nothing: what was found.
        problem: what was planned.
        memory: see :func:`more_memory`; its plan is the one that comes closest.
        timelines: of that plan's memory, by device.
        replan: searches for a plan that fits.
        oracle: scores a plan.
    """
    plan = nothing.closest if memory is None else memory.found
    limits = problem.limits(plan)

    ask = problem.only_possible(replan)
    changes = (
        _smaller_microbatches(problem, ask),
        _recompute(plan, limits, oracle, ask) if problem.saves else None,
        _offload(plan, limits, timelines),
        memory,
        _more_devices(problem, ask),
    )
    return tuple(change for change in changes if change is not None)


def _recompute(plan: Plan, limits: Sequence[float], oracle: Oracle, replan: Replan) -> Change | None:
    """Of the plan that comes closest the fewest stages, where they are fewer than those of a plan that is found."""
    found = replan(Asked(recompute=True))
    if found is None:
        return None
    fewest, count = _fewest(plan, limits, oracle), len(found.memory.recompute)
    return fewest if fewest is not None and fewest.value < count else Change(RECOMPUTE, count, found)


def _fewest(plan: Plan, limits: Sequence[float], oracle: Oracle) -> Change | None:
    """The fewest stages of devices that lack memory, those first that save most; None where all of them are too few."""
    assert plan.prediction is not None
    costs = plan.prediction.costs
    lacking = {device for device, lack in enumerate(excess(plan, limits)) if lack}
    again = plan.memory.recompute
    held = [stage.index for stage in plan.stages if stage.device in lacking and stage.index not in again]
    held.sort(key=lambda stage: (costs[stage].input_bytes - costs[stage].saved_bytes, stage))
    for count in range(1, len(held) + 1):
        chosen = tuple(sorted((*again, *held[:count])))
        changed = with_costs(evolve(plan, memory=evolve(plan.memory, recompute=chosen)), costs, oracle)
        if not any(excess(changed, limits)):
            return Change(RECOMPUTE, count, changed)
    return None


def _more_devices(problem: Problem, replan: Replan) -> Change | None:
    """By doubling, then by halving the gap."""
    here = problem.devices
    most = min(MOST_DEVICES * here, len(problem.graph.nodes))
    numbers = sorted({min(here << doubling, most) for doubling in range(1, MOST_DEVICES.bit_length())})
    devices, found = _least(lambda number: replan(Asked(devices=number)), here, (n for n in numbers if n > here))
    return None if found is None else Change(MORE_DEVICES, devices, found)


def _smaller_microbatches(problem: Problem, replan: Replan) -> Change | None:
    """Twice as many microbatches of half the size, and so on."""
    if problem.microbatches is None:
        return None
    parts = 2
    while parts <= SMALLEST_MICROBATCH and (problem.rows is None or problem.microbatches * parts <= problem.rows):
        found = replan(Asked(parts=parts))
        if found is not None:
            return Change(SMALLER_MICROBATCHES, problem.microbatches * parts, found)
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
