"""If no plan fits: the smallest changes with which one does; and whether fewer devices alone are faster.

No change is guessed: each comes with the plan that was found with it, by the same search that a request with this
change would run. The number of these searches is bounded.
"""

from collections.abc import Callable, Iterable, Sequence
from math import ceil, floor, log10

from attrs import evolve, frozen

from ...cluster.cluster import Cluster
from ...cluster.mesh import least_by_position
from ...cluster.routing import Link
from ...costs.graph import OpEdge, OpGraph, OpNode
from ...errors import InfeasibleError, RequestError
from ...plan.plan import Plan
from ...policies.sharding import LEVELS, NONE, part_of_graph
from .infeasible import NothingFits, excess, operator_bytes

RECOMPUTE = "recompute"
MORE_DEVICES = "more devices"
SMALLER_MICROBATCHES = "smaller microbatches"
MORE_MEMORY = "more memory"
OFFLOAD = "offload"
SHARD = "shard"

MOST_DEVICES = 8
"""Largest number of devices to try, as a multiple of the present number."""
NODE = 8
"""Devices from which on only multiples of their number are tried."""
SMALLEST_MICROBATCH = 16
"""Largest number of parts of a microbatch to try."""
PARTS = 16
"""Parts of what the closest plan lacks in which a suggested number of bytes is searched."""
DIGITS = 3
"""Significant digits of a suggested number of bytes."""
DOUBLINGS = 12
"""Largest number of doublings of the further memory until a plan is found."""


@frozen
class Change:
    """A change with which a plan fits.

    Args:
        what: one of this module's names.
        value: number of devices, of microbatches per step, of stages that recompute, or of replicas that share; further
            bytes for each device; or bytes that leave all devices together in one step.
        found: a plan that fits with the change.
    """

    what: str
    value: float
    found: Plan


@frozen
class Relaxation:
    """A change to a request that no plan fits.

    Args:
        devices: their number; None for the request's.
        parts: each microbatch is split into this many.
        extra_bytes: further memory of each device.
        recompute: whether stages may recompute, even if the request excludes it.
        offload: whether saved tensors may leave the devices, even if the request excludes it.
        shard: what the replicas of a stage share (see ``policies/sharding``); None for what the request has.
    """

    devices: int | None = None
    parts: int = 1
    extra_bytes: float = 0.0
    recompute: bool = False
    offload: bool = False
    shard: str | None = None


Replan = Callable[[Relaxation], Plan | None]
"""A plan that fits the changed request, by the first part of the search that this request would run; None if it finds
none."""


@frozen
class InfeasibleRequest:
    """A request that no plan fits.

    Args:
        graph: with the costs of one microbatch.
        microbatches: of a step, over all replicas; None if the search chooses their size.
        memory: bytes that each of the cluster's devices may hold.
        recompute_excluded: whether no stage may recompute.
        rows: of the batch of one step, if known: a microbatch has at least one.
        offload_excluded: whether all saved tensors stay on the devices, and a change may offload them.
        replicas: the most that a plan may have and that could share more; 1 if they share everything already.
        shard: what they share already.
    """

    graph: OpGraph
    microbatches: int | None
    memory: Sequence[float]
    recompute_excluded: bool = True
    rows: int | None = None
    offload_excluded: bool = True
    replicas: int = 1
    shard: str = NONE

    @property
    def devices(self) -> int:
        """Number of the cluster's devices."""
        return len(self.memory)

    @property
    def least(self) -> OpGraph:
        """The graph with the least state that a device may hold of each operator."""
        return part_of_graph(self.graph, self.devices, self.shard)

    @property
    def limit(self) -> float:
        """Bytes that the device with the most memory may hold."""
        return max(self.memory)

    def limits(self, plan: Plan) -> tuple[float, ...]:
        """Bytes that the device at each position of a plan may hold, in every replica."""
        return least_by_position(self.memory, plan.mesh.replicas)

    def may_fit(self, change: Relaxation) -> bool:
        """Whether a plan is possible by two lower bounds of memory.

        All devices together hold the state of all operators, whatever replicas share, and the saved tensors of one
        microbatch between its last forward and its first backward. One device holds each single operator while it runs.
        """
        limit, devices = self.limit + change.extra_bytes, change.devices or self.devices
        state = sum(node.resident_bytes for node in self.graph.nodes)
        stay = self._all_stay(change)
        saved = sum(node.saved_bytes for node in self.graph.nodes) / change.parts if stay else 0
        nodes = part_of_graph(self.graph, devices, change.shard or self.shard).nodes
        largest = max(operator_bytes(node, saves=stay, parts=change.parts) for node in nodes)
        return state + saved <= devices * limit and largest <= limit

    def _all_stay(self, change: Relaxation) -> bool:
        """Whether all saved tensors stay on the devices until their backward."""
        return self.recompute_excluded and self.offload_excluded and not change.recompute and not change.offload

    def only_possible(self, replan: Replan) -> Replan:
        """The search, which is not run for changes with which no plan is possible."""
        return lambda change: replan(change) if self.may_fit(change) else None


def _smallest(search: Callable[[int], Plan | None], low: int, numbers: Iterable[int]) -> tuple[int, Plan | None]:
    """The smallest number with which a plan is found: the first of ``numbers``, then by bisection.

    Args:
        search: a number → a plan with it, or None.
        low: a number with which none is found.
        numbers: ascending, above ``low``.
    """
    high, found = low, None
    for number in numbers:
        high, found = number, search(number)
        if found is not None:
            break
        low = number
    while found is not None and high - low > 1:
        middle = (low + high) // 2
        better = search(middle)
        if better is None:
            low = middle
        else:
            high, found = middle, better
    return high, found


def more_memory(nothing: NothingFits, problem: InfeasibleRequest, replan: Replan) -> Change | None:
    """The smallest further memory of each device with which a plan is found, in bytes of ``DIGITS`` significant digits
    and in ``PARTS`` of what the closest plan lacks."""
    search, missing = problem.only_possible(replan), max(excess(nothing.closest, nothing.limits))

    def size(parts: int) -> int:
        return _rounded_up(missing * parts / PARTS)

    larger = (PARTS << doubling for doubling in range(DOUBLINGS + 1))
    parts, found = _smallest(lambda parts: search(Relaxation(extra_bytes=size(parts))), 0, larger)
    return None if found is None else Change(MORE_MEMORY, size(parts), found)


def _rounded_up(size: float) -> int:
    """The next number of ``DIGITS`` significant digits."""
    unit: int = 10 ** max(floor(log10(max(size, 1.0))) + 1 - DIGITS, 0)
    return ceil(size / unit) * unit


def smallest_changes(problem: InfeasibleRequest, memory: Change | None, replan: Replan) -> tuple[Change, ...]:
    """The smallest change of each kind with which a plan fits, without the kinds that do not help.

    Args:
        memory: see :func:`more_memory`.
    """
    search = problem.only_possible(replan)
    changes = (
        _shard(problem, search) if problem.replicas > 1 else None,
        _smaller_microbatches(problem, search),
        _recompute(search) if problem.recompute_excluded else None,
        _offload(search) if problem.offload_excluded else None,
        memory,
        _more_devices(problem, search),
    )
    return tuple(change for change in changes if change is not None)


def _recompute(search: Replan) -> Change | None:
    """A plan that recomputes, and the number of its stages that do."""
    found = search(Relaxation(recompute=True))
    return None if found is None else Change(RECOMPUTE, len(found.memory.recompute), found)


def _more_devices(problem: InfeasibleRequest, replan: Replan) -> Change | None:
    """The smallest number of devices, by doubling and then bisection; of many, as many again, as whole nodes are."""
    here = problem.devices
    unit = here if here >= NODE else 1
    most = min(MOST_DEVICES * here, len(problem.graph.nodes)) // unit
    numbers = sorted({min(here // unit << doubling, most) for doubling in range(1, MOST_DEVICES.bit_length())})
    larger = (number for number in numbers if number * unit > here)
    units, found = _smallest(lambda number: replan(Relaxation(devices=number * unit)), here // unit, larger)
    return None if found is None else Change(MORE_DEVICES, units * unit, found)


def _smaller_microbatches(problem: InfeasibleRequest, replan: Replan) -> Change | None:
    """The smallest power of two of parts of each microbatch."""
    if problem.microbatches is None:
        return None
    parts = 2
    while parts <= SMALLEST_MICROBATCH and (problem.rows is None or problem.microbatches * parts <= problem.rows):
        found = replan(Relaxation(parts=parts))
        if found is not None:
            return Change(SMALLER_MICROBATCHES, problem.microbatches * parts, found)
        parts *= 2
    return None


def _shard(problem: InfeasibleRequest, search: Replan) -> Change | None:
    """A plan whose replicas share as little more as fits."""
    for level in LEVELS[LEVELS.index(problem.shard) + 1 :]:
        found = search(Relaxation(shard=level))
        if found is not None:
            return Change(SHARD, found.mesh.data, found)
    return None


def _offload(search: Replan) -> Change | None:
    """A plan that offloads, and what it moves in one step."""
    found = search(Relaxation(offload=True))
    if found is None or not found.memory.offload:
        return None
    return Change(OFFLOAD, sum(each.bytes * len(each.copies) for each in found.memory.offload), found)


def with_more_devices(cluster: Cluster, count: int) -> Cluster:
    """The cluster with ``count`` devices: further ones have the properties and the links of the last one.

    If the last device is linked to other devices directly, new devices are also linked to it and to each other.
    """
    last = cluster.devices[-1]
    names = {end for link in cluster.links for end in (link.a, link.b)} | {device.name for device in cluster.devices}
    own = [link for link in cluster.links if last.name in (link.a, link.b)]
    known = {device.name for device in cluster.devices}
    direct = next((link for link in own if _other(link, last.name) in known), None)
    devices, links = list(cluster.devices), list(cluster.links)
    for number in range(len(devices), count):
        name = f"device{number}"
        while name in names:
            name += "+"
        names.add(name)
        new = [_between(link, last.name, _other(link, last.name), name) for link in own]
        if direct is not None:
            new += [_between(direct, last.name, device.name, name) for device in devices[len(cluster.devices) - 1 :]]
        links += new
        devices.append(evolve(last, name=name))
    return evolve(cluster, devices=tuple(devices), links=tuple(links))


def _between(like: Link, end: str, other: str, name: str) -> Link:
    """A link between two places like a link of ``end``, in whose place is ``name``."""
    if like.back_bytes_per_s is None or like.b == end:
        return evolve(like, a=other, b=name)
    return evolve(like, a=name, b=other)


def _other(link: Link, end: str) -> str:
    return link.b if link.a == end else link.a


def with_smaller_microbatches(graph: OpGraph, parts: int) -> OpGraph:
    """The graph for microbatches of one ``parts``-th of the size.

    Costs are in proportion to the size. Times are then too short for operators that do not fill the device.
    """

    def node(given: OpNode) -> OpNode:
        return evolve(
            given,
            forward_s=given.forward_s / parts,
            backward_input_s=given.backward_input_s / parts,
            backward_weight_s=given.backward_weight_s / parts,
            saved_bytes=ceil(given.saved_bytes / parts),
            workspace_bytes=ceil(given.workspace_bytes / parts),
        )

    def edge(given: OpEdge) -> OpEdge:
        return evolve(given, bytes=ceil(given.bytes / parts))

    return evolve(graph, nodes=tuple(map(node, graph.nodes)), edges=tuple(map(edge, graph.edges)))


def with_more_memory(cluster: Cluster, extra_bytes: float) -> Cluster:
    """The cluster with ``extra_bytes`` more memory on each device."""
    devices = (evolve(device, memory_bytes=device.memory_bytes + ceil(extra_bytes)) for device in cluster.devices)
    return evolve(cluster, devices=tuple(devices))


SLOWER = 0.99
"""A plan for fewer devices is faster if its step takes at most this share of the other's."""


def faster_alone(plan: Plan, search: Callable[[int], Plan]) -> Plan | None:
    """The fastest plan for half of the devices, a quarter and so on down to one; None if none is faster.

    A number of devices is only searched if a plan whose devices never idle would be faster.

    Args:
        plan: for all devices, in one pipeline, with its prediction.
        search: a number n → the best plan for the first n devices.
    """
    costs, best, found = plan.predicted.costs, SLOWER * plan.predicted.step_s, None
    compute_s = plan.microbatches * sum(cost.forward_s + cost.full_backward_s for cost in costs)
    devices = plan.devices // 2
    while devices and compute_s / devices < best:
        try:
            other = search(devices)
        except (InfeasibleError, RequestError):
            other = plan
        if other.predicted.step_s < best:
            best, found = other.predicted.step_s, other
        devices //= 2
    return found
