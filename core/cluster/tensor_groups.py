"""Groups of tensor ranks as the devices of a cluster: what the search, the simulator and the memory model plan with.

The tensor ranks of a stage run the same actions at the same time: each of their all-reduces is a barrier. So a group is
one device with the memory of one rank. A message between two groups is one message a rank, each over the path of its
own two devices; a reduction over replicas is one reduction a rank::

    group 0   gpu0  gpu1  gpu2  gpu3          ring of the group's all-reduces: gpu0 → gpu1 → gpu2 → gpu3 → gpu0
                │     │     │     │           a message: four paths at the same time, each with the whole bytes
    group 1   gpu4  gpu5  gpu6  gpu7

All of them cross the links of the cluster, where they contend.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache

from attrs import evolve, frozen

from ..errors import RequestError
from .cluster import Cluster, Hub
from .collectives import Algorithm, Operation, Phase, collective_phases
from .routing import Hop, ParallelPath, Router


class GroupRouter(Router):
    """Paths between groups.

    Args:
        cluster: of the devices.
        groups: per group its devices.
    """

    def __init__(self, cluster: Cluster, groups: Sequence[Sequence[int]]) -> None:
        self.cluster = cluster
        self.groups = groups

    def path(self, src: int, dst: int) -> tuple[Hop, ...]:
        """The paths from each rank of group ``src`` to the same rank of group ``dst``."""
        pairs = zip(self.groups[src], self.groups[dst], strict=True)
        return ParallelPath.of([self.cluster.path(a, b) for a, b in pairs])

    def nearest(self, src: int, kind: str) -> tuple[Hop, ...] | None:
        """Groups have no path to a host: copies of several ranks to the host are not modelled."""
        return None


@frozen(slots=False, cache_hash=True)
class GroupedCluster(Cluster):
    """A cluster whose devices are groups of tensor ranks; each is named after its first device.

    Args:
        whole: the cluster of the single devices.
        groups: per device of this cluster the numbers of its ranks' devices in ``whole``.
    """

    whole: Cluster | None = None
    groups: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def _router(self) -> Router:
        return GroupRouter(self.single, self.groups)

    @property
    def single(self) -> Cluster:
        """The cluster of the single devices."""
        assert self.whole is not None  # every constructor of this module gives it
        return self.whole

    @property
    def tensor(self) -> int:
        """Number of tensor ranks of each group."""
        return len(self.groups[0])

    def arranged(self, order: Sequence[int]) -> "GroupedCluster":
        """The same groups in another order."""
        devices = tuple(self.devices[number] for number in order)
        return evolve(self, devices=devices, groups=tuple(self.groups[number] for number in order))

    def ring(self, device: int) -> Phase:
        """The ring of a group's all-reduce of one byte: bytes over each edge, latency, and the links crossed.

        Bytes and links are those of ``collectives.py``, which has the source.
        """
        return group_ring(self.single, self.groups[device])

    @cached_property
    def slowest_ring(self) -> tuple[float, float]:
        """Latency, and seconds per byte, of an all-reduce of any group without contention: the worst of all groups."""
        rings = [self.ring(device) for device in range(len(self.devices))]
        return max(ring.latency_s for ring in rings), max(ring.bytes / ring.bytes_per_s for ring in rings)


RING_START_S = 8.4e-6
NVLINK_HOP_S = 3.4e-6
"""NCCL's own latencies of a ring with the Simple protocol: once, and for each hop over NVLink (``baseLat`` and
``hwLat`` in src/graph/tuning.cc, NCCL 2.18). The latency of a link in the catalogue is that of a whole message between
two kernels, which a ring inside one kernel does not pay at each hop."""


@lru_cache(maxsize=4096)
def group_ring(cluster: Cluster, group: tuple[int, ...]) -> Phase:
    """The ring of the all-reduce of one byte over these devices."""
    (ring,) = collective_phases(cluster, group, 1.0, Operation.ALL_REDUCE, Algorithm.RING)
    switches = {hub.name for hub in cluster.hubs if hub.kind == "switch"} | {each.name for each in cluster.devices}
    if all(end in switches for link, _ in ring.crossings for end in (link.a, link.b)):
        hops = 2 * (len(group) - 1)
        return evolve(ring, latency_s=min(ring.latency_s, RING_START_S + hops * NVLINK_HOP_S))
    return ring


@lru_cache(maxsize=64)
def grouped(cluster: Cluster, groups: tuple[tuple[int, ...], ...]) -> GroupedCluster:
    """The cluster of these groups; devices in none of the groups become hubs, which paths may cross.

    Raises:
        RequestError: the devices of a group differ in type or memory.
    """
    for group in groups:
        first = cluster.devices[group[0]]
        for other in (cluster.devices[number] for number in group[1:]):
            if (other.type, other.memory_bytes) != (first.type, first.memory_bytes):
                raise RequestError(
                    f"devices '{first.name}' and '{other.name}' are tensor ranks of one stage and differ in type or "
                    "memory: give groups of equal devices"
                )
    heads = {group[0] for group in groups}
    others = (device for number, device in enumerate(cluster.devices) if number not in heads)
    return GroupedCluster(
        tuple(cluster.devices[group[0]] for group in groups),
        (*cluster.hubs, *(Hub(device.name) for device in others)),
        cluster.links,
        cluster.types,
        cluster,
        groups,
    )


def consecutive_groups(cluster: Cluster, tensor: int) -> GroupedCluster:
    """The cluster with every ``tensor`` consecutive devices as a group.

    Raises:
        RequestError: ``tensor`` does not divide the number of devices, or the devices of a group differ.
    """
    count = len(cluster.devices)
    if tensor < 1 or count % tensor:
        raise RequestError(
            f"{tensor} tensor ranks do not divide the {count} devices of the cluster: give a divisor of {count}"
        )
    return grouped(cluster, tuple(tuple(range(first, first + tensor)) for first in range(0, count, tensor)))
