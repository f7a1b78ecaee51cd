"""A step without any contention, in one pass instead of in SimPy; exactly what SimPy's run gives.

A step of compute and messages follows from the dependencies alone if no two messages are on a link at one time, and no
message waits for the one before it. Then every time is the same sum as in `device`, `channels` and `network`: an
operation ends its duration after its start, and a message arrives its time on free links after both ends are ready. So
the pass of `uncontended_times` is run first, its transfers are compared link by link, and where two of them overlap
nothing of it is used: the step is run in SimPy.
"""

from collections.abc import Mapping, Sequence

import numpy
from simpy import Environment

from ..core.cluster.cluster import Cluster
from ..core.cluster.routing import path_latency_s, path_rate
from ..core.costs.costs import StageCosts
from ..core.plan.plan import Plan
from ..core.plan.queues import Queues
from ..core.plan.validation.uncontended_times import UncontendedQueue, UncontendedTimes, uncontended_times
from .network.flow_times import FlowTimes
from .network.flows import DirectedLink, Route
from .network.network import Network
from .times import QueueTimes

Pair = tuple[int, int]
Uncontended = tuple[tuple[tuple[list[float], list[float]], ...], dict[Pair, QueueTimes]]
"""Per device the starts and the ends of its operations, and per ordered pair of devices its messages."""


def uncontended(
    plan: Plan,
    queues: Queues,
    costs: Sequence[StageCosts],
    cluster: Cluster,
    *,
    eager: bool,
    sharing: bool,
    known: UncontendedTimes | None = None,
) -> Uncontended | None:
    """The times of a step in which nothing contends.

    Args:
        plan, queues, costs, cluster: of the step.
        eager: a send needs no posted receive.
        sharing: whether transfers share the bandwidth of links.
        known: the step's times on free links, if they are known; with the simulator's `eager` and costs.

    Returns:
        The times; None if SimPy must find them: there are other tasks, or all-reduces of tensor ranks; a transfer
        contends or waits for another one; or the plan deadlocks.
    """
    if queues.tasks or any(cost.reductions is not None for cost in costs):
        return None
    routes = _routes(queues, cluster, sharing)

    def hop(src: int, dst: int) -> tuple[float, float]:
        route = routes[src, dst]
        return route.latency_s, route.bytes_per_s

    free = uncontended_times(plan, queues, costs, hop, lambda _: 0.0, eager=eager) if known is None else known
    if free is None or free.in_turn or _overlap(queues, routes, free.queues):
        return None
    return free.operations, {pair: _queue_times(queues, pair, routes[pair], own) for pair, own in free.queues.items()}


def _routes(queues: Queues, cluster: Cluster, sharing: bool) -> dict[Pair, Route]:
    network = Network(Environment())
    routes = {}
    for pair in queues.messages:
        path = cluster.path(*pair)
        routes[pair] = network.route(path, path_latency_s(path), path_rate(path))
    if sharing:
        network.find_shared()
    network.close()
    return routes


def _overlap(queues: Queues, routes: Mapping[Pair, Route], transfers: Mapping[Pair, UncontendedQueue]) -> bool:
    """Whether two transfers are on a link at one time that may slow them."""
    crossing: dict[DirectedLink, list[Pair]] = {}
    for pair, route in routes.items():
        for link in route.crossed:
            crossing.setdefault(link, []).append(pair)
    spans = {}
    for pair in {pair for pairs in crossing.values() for pair in pairs}:
        starts = numpy.array(transfers[pair].starts)
        sizes = numpy.array([message.bytes for message in queues.messages[pair]], dtype=numpy.float64)
        moving = sizes > 0
        spans[pair] = starts[moving], starts[moving] + sizes[moving] / routes[pair].bytes_per_s
    for pairs in crossing.values():
        starts = numpy.concatenate([spans[pair][0] for pair in pairs])
        drained = numpy.concatenate([spans[pair][1] for pair in pairs])
        order = numpy.lexsort((-drained, starts))
        if (starts[order][1:] < drained[order][:-1]).any():
            return True
    return False


def _queue_times(queues: Queues, pair: Pair, route: Route, own: UncontendedQueue) -> QueueTimes:
    links, rate = route.directions, route.bytes_per_s
    flows = [
        FlowTimes(links, message.bytes, rate, start, start + message.bytes / rate)
        for message, start in zip(queues.messages[pair], own.starts, strict=True)
    ]
    return QueueTimes(flows, own.ready, own.starts, own.arrivals)
