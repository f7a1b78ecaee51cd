"""The exchanges of a stage's tensor, context and expert ranks, as part of its actions.

An action computes, and its all-reduces follow as one flow of all their bytes over the ring of the group, where other
traffic may share the links; then a flow for each other kind of ranks. In a run they alternate with the layers; a rank
waits for each, so the sum is the same::

    compute queue   │ F: layers and latencies of the all-reduces ──│── bytes over the ring ──│ F of the next …
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from attrs import frozen

from ..core.actions import Action, Kind
from ..core.cluster.cluster import Cluster
from ..core.cluster.tensor_groups import GroupedCluster
from ..core.costs.costs import StageCosts
from ..core.costs.reductions import TensorReductions
from .device import DeviceQueue
from .network import Flow, Network, Route

_Part = tuple[int, int, float]
_PARTS: Mapping[Kind, Callable[[TensorReductions], _Part]] = {
    Kind.F: lambda found: (found.forward, found.forward_bytes, found.forward_s),
    Kind.RECOMPUTE: lambda found: (found.forward, found.forward_bytes, found.forward_s),
    Kind.B: lambda found: (found.backward, found.backward_bytes, found.backward_s),
    Kind.I: lambda found: (found.backward, found.backward_bytes, found.backward_s),
}
"""The kinds that have exchanges: their number, bytes, and seconds in the stage's costs. W has none."""


@frozen
class TensorSum:
    """The exchanges of one action.

    Args:
        parts: kinds of ranks, and the bytes over each of their paths.
        extra_s: to add to the action's time from the stage's costs: the latencies on this cluster, without the time
            of the exchanges that the costs contain.
        alone_s: the same, with the time of the parts on links that nothing else uses.
    """

    parts: tuple[tuple[str, float], ...]
    extra_s: float
    alone_s: float


def tensor_sums(
    cluster: Cluster, compute: Sequence[Sequence[Action]], costs: Sequence[StageCosts]
) -> list[dict[int, TensorSum]]:
    """Per device its actions' exchanges, by position in the compute queue; empty without tensor ranks."""
    if not isinstance(cluster, GroupedCluster) or all(cost.reductions is None for cost in costs):
        return []
    result = []
    for device, actions in enumerate(compute):
        known: dict[tuple[int, Kind], TensorSum] = {}
        own: dict[int, TensorSum] = {}
        for position, action in enumerate(actions):
            found = costs[action.stage].reductions
            if found is None or action.kind not in _PARTS:
                continue
            key = action.stage, action.kind
            if key not in known:
                known[key] = _sum_of(cluster, device, found, _PARTS[action.kind])
            own[position] = known[key]
        result.append(own)
    return result


def _sum_of(
    cluster: GroupedCluster, device: int, found: TensorReductions, part: Callable[[TensorReductions], _Part]
) -> TensorSum:
    parts, extra_s, moved_s = [], 0.0, 0.0
    for each in found.each:
        ring = cluster.ring(device, each.over)
        count, size, seconds = part(each)
        extra_s += count * ring.latency_s - seconds
        if size:
            parts.append((each.over, size * ring.bytes))
            moved_s += size * ring.bytes / ring.bytes_per_s
    return TensorSum(tuple(parts), extra_s, extra_s + moved_s)


def connect_sums(
    network: Network, cluster: Cluster, sums: Sequence[Mapping[int, TensorSum]], devices: Sequence[DeviceQueue]
) -> list[Flow]:
    """The flows of all-reduces, each started by its action."""
    flows: list[Flow] = []
    for number, own in enumerate(sums):
        assert isinstance(cluster, GroupedCluster)
        queue, routes = devices[number], dict[str, Route]()
        queue.flows = [None] * len(queue.seconds)
        for position, found in own.items():
            then: Callable[[], None] = queue.finish
            for over, size in reversed(found.parts):
                if over not in routes:
                    ring = cluster.ring(number, over)
                    routes[over] = network.route(ring.crossings, 0.0, ring.bytes_per_s)
                flow = Flow(routes[over], size, then)
                flows.append(flow)
                then = partial(network.start, flow)
            if found.parts:
                queue.flows[position] = then
    return flows
