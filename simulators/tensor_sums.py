"""The all-reduces of a stage over its tensor ranks, as part of its actions.

An action computes, and its all-reduces follow as one flow of all their bytes over the ring of the group, where other
traffic may share the links. In a run they alternate with the layers; a rank waits for each, so the sum is the same::

    compute queue   │ F: layers and latencies of the all-reduces ──│── bytes over the ring ──│ F of the next …
"""

from collections.abc import Callable, Mapping, Sequence

from attrs import frozen

from ..core.actions import Action, Kind
from ..core.cluster.cluster import Cluster
from ..core.cluster.tensor_groups import GroupedCluster
from ..core.costs.costs import StageCosts
from ..core.costs.reductions import TensorReductions
from .device import DeviceQueue
from .network.flows import Flow, Shipment
from .network.network import Network

_PARTS: Mapping[Kind, Callable[[TensorReductions], tuple[int, int, float]]] = {
    Kind.F: lambda found: (found.forward, found.forward_bytes, found.forward_s),
    Kind.RECOMPUTE: lambda found: (found.forward, found.forward_bytes, found.forward_s),
    Kind.B: lambda found: (found.backward, found.backward_bytes, found.backward_s),
    Kind.I: lambda found: (found.backward, found.backward_bytes, found.backward_s),
}
"""The kinds that have all-reduces: their number, bytes, and seconds in the stage's costs. W has none."""


@frozen
class TensorSum:
    """The all-reduces of one action.

    Args:
        bytes: over each edge of the ring.
        extra_s: to add to the action's time from the stage's costs: the latencies on this cluster, without the time
            of the all-reduces that the costs contain.
    """

    bytes: float
    extra_s: float


def tensor_sums(
    cluster: Cluster, compute: Sequence[Sequence[Action]], costs: Sequence[StageCosts]
) -> list[dict[int, TensorSum]]:
    """Per device its actions' all-reduces, by position in the compute queue; empty without tensor ranks.

    Args:
        cluster: its devices in the order of ranks.
        compute: per device its compute queue.
        costs: per stage.
    """
    if not isinstance(cluster, GroupedCluster) or all(cost.reductions is None for cost in costs):
        return []
    result = []
    for device, actions in enumerate(compute):
        ring = cluster.ring(device)
        known: dict[tuple[int, Kind], TensorSum] = {}
        own: dict[int, TensorSum] = {}
        for position, action in enumerate(actions):
            found = costs[action.stage].reductions
            if found is None or action.kind not in _PARTS:
                continue
            key = action.stage, action.kind
            if key not in known:
                count, size, seconds = _PARTS[action.kind](found)
                known[key] = TensorSum(size * ring.bytes, count * ring.latency_s - seconds)
            own[position] = known[key]
        result.append(own)
    return result


def connect_sums(
    network: Network, cluster: Cluster, sums: Sequence[Mapping[int, TensorSum]], devices: Sequence[DeviceQueue]
) -> list[Flow]:
    """The flows of all-reduces, each started by its action.

    Args:
        network: whose links they cross.
        cluster: its devices in the order of ranks.
        sums: of ``tensor_sums``.
        devices: by rank, not yet started.
    """
    flows: list[Flow] = []
    for number, own in enumerate(sums):
        assert isinstance(cluster, GroupedCluster)
        ring, queue = cluster.ring(number), devices[number]
        route = network.route(ring.crossings, 0.0, ring.bytes_per_s)
        queue.flows = [None] * len(queue.seconds)
        for position, found in own.items():
            if found.bytes:
                flow = Shipment(route, found.bytes, queue.finish)
                flows.append(flow)
                queue.flows[position] = _start_of(network, flow)
    return flows


def _start_of(network: Network, flow: Flow) -> Callable[[], None]:
    return lambda: network.start(flow)
