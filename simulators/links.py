"""How much of each link a step used."""

from attrs import frozen

from ..core.cluster import Cluster
from ..core.messages import Exchange


@frozen
class LinkUse:
    """One direction of one link over a step.

    Args:
        src, dst: names of the devices or hubs that it leads from and to.
        bytes: what crossed it.
        bytes_per_s: what it can move.
        utilisation: bytes ÷ what it can move in the time of the step.
    """

    src: str
    dst: str
    bytes: float
    bytes_per_s: float
    utilisation: float


def link_uses(cluster: Cluster, exchange: Exchange, step_s: float) -> tuple[LinkUse, ...]:
    """Use of every link direction that a message crosses, in the cluster's order, from a to b first."""
    carried: dict[tuple[str, str], float] = {}
    for (src, dst), messages in exchange.queues.items():
        size = sum(message.bytes for message in messages)
        for link, from_a in cluster.path(src, dst):
            ends = (link.a, link.b) if from_a else (link.b, link.a)
            carried[ends] = carried.get(ends, 0.0) + size
    uses = []
    for link in cluster.links:
        for ends in ((link.a, link.b), (link.b, link.a)):
            if ends in carried:
                share = carried[ends] / (link.bytes_per_s * step_s) if step_s else 0.0
                uses.append(LinkUse(*ends, carried[ends], link.bytes_per_s, share))
    return tuple(uses)
