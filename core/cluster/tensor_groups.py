"""Groups of ranks as the devices of a cluster: what the search, the simulator and the memory model plan with.

The tensor ranks of a stage run the same actions at the same time: each of their all-reduces is a barrier. Context ranks
and expert ranks do, too (see ``core/costs/reductions``). So a group is one device with the memory of one rank. A
message between two groups is one message a rank, each over the path of its own two devices; a reduction over replicas
is one reduction a rank::

    group 0   gpu0  gpu1  gpu2  gpu3          ring of the group's all-reduces: gpu0 → gpu1 → gpu2 → gpu3 → gpu0
                │     │     │     │           a message: four paths at the same time, each with the whole bytes
    group 1   gpu4  gpu5  gpu6  gpu7

All of them cross the links of the cluster, where they contend. In a group tensor ranks are next to each other, then
context ranks, then expert ranks: rank (e × context + c) × tensor + t.
"""

from collections.abc import Sequence
from functools import lru_cache

from attrs import evolve, frozen

from ..errors import RequestError
from .cluster import Cluster, Hub
from .collectives import Phase, ring_order, rings
from .rank_kinds import CONTEXT_RANKS, EXPERT_RANKS, TENSOR_RANKS
from .routing import Hop, ParallelPath, path_latency_s


@frozen(slots=False, cache_hash=True)
class GroupedCluster(Cluster):
    """A cluster whose devices are groups of tensor ranks; each is named after its first device.

    Args:
        whole: the cluster of the single devices.
        groups: per device of this cluster the numbers of its ranks' devices in ``whole``.
        context, experts: numbers of context ranks and of expert ranks in a group.
    """

    whole: Cluster | None = None
    groups: tuple[tuple[int, ...], ...] = ()
    context: int = 1
    experts: int = 1

    @property
    def single(self) -> Cluster:
        """The cluster of the single devices."""
        assert self.whole is not None  # every constructor of this module gives it
        return self.whole

    @property
    def width(self) -> int:
        """Number of ranks of each group."""
        return len(self.groups[0])

    @property
    def tensor(self) -> int:
        """Number of tensor ranks of each group."""
        return self.width // (self.context * self.experts)

    def path(self, src: int, dst: int) -> tuple[Hop, ...]:
        """The paths from each rank of group ``src`` to the same rank of group ``dst``."""
        if (src, dst) not in self._paths:
            pairs = zip(self.groups[src], self.groups[dst], strict=True)
            self._paths[src, dst] = ParallelPath.of([self.single.path(a, b) for a, b in pairs])
        return self._paths[src, dst]

    def host_path(self, device: int) -> tuple[Hop, ...]:
        """Raises a RequestError: copies of several ranks to the host are not modelled."""
        raise RequestError(
            f"{self.width} ranks of a stage share its work, and their copies to the host are not modelled: leave "
            "offload out"
        )

    def arranged(self, order: Sequence[int]) -> "GroupedCluster":
        """The same groups in another order."""
        devices = tuple(self.devices[number] for number in order)
        return evolve(self, devices=devices, groups=tuple(self.groups[number] for number in order))

    def ring(self, device: int, over: str = TENSOR_RANKS) -> Phase:
        """The exchange of one byte over a group's ranks of one kind: bytes over each path, latency, links crossed.

        All ranks of the group take part. Bytes and links of all-reduces are those of ``collectives.py``, which has the
        source. Context ranks pass the byte on in a ring, and expert ranks send each other equal parts of it.
        """
        return group_exchange(self.single, self._divided(device, over), over)

    def _divided(self, device: int, *over: str) -> tuple[tuple[int, ...], ...]:
        """A group's ranks, divided into those that differ in these kinds alone."""
        found: dict[tuple[int, ...], list[int]] = {}
        for place, rank in enumerate(self.groups[device]):
            rest, t = divmod(place, self.tensor)
            e, c = divmod(rest, self.context)
            at = {TENSOR_RANKS: t, CONTEXT_RANKS: c, EXPERT_RANKS: e}
            found.setdefault(tuple(n for kind, n in at.items() if kind not in over), []).append(rank)
        return tuple(map(tuple, found.values()))

    def slowest(self, over: str = TENSOR_RANKS) -> tuple[float, float]:
        """Latency, and seconds per byte, of `ring` without contention: the worst of all groups."""
        return _worst([self.ring(device, over) for device in range(len(self.devices))])

    def slowest_sum(self, over: tuple[str, ...]) -> tuple[float, float]:
        """The same of the all-reduce of a gradient over the ranks of these kinds."""
        groups = [self._divided(device, *over) for device in range(len(self.devices))]
        return _worst([group_exchange(self.single, divided) for divided in groups])


def _worst(rings: Sequence[Phase]) -> tuple[float, float]:
    return max(ring.latency_s for ring in rings), max(ring.bytes / ring.bytes_per_s for ring in rings)


RING_START_S = 8.4e-6
NVLINK_HOP_S = 3.4e-6
"""NCCL's own latencies of a ring with the Simple protocol: once, and for each hop over NVLink (``baseLat`` and
``hwLat`` in src/graph/tuning.cc, NCCL 2.18). The latency of a link in the catalogue is that of a whole message between
two kernels, which a ring inside one kernel does not pay at each hop."""


@lru_cache(maxsize=4096)
def group_exchange(cluster: Cluster, groups: tuple[tuple[int, ...], ...], over: str = TENSOR_RANKS) -> Phase:
    """The exchange of one byte in each of some groups at the same time, see `GroupedCluster.ring`."""
    count = len(groups[0])
    if over != TENSOR_RANKS:
        steps = (1,) if over == CONTEXT_RANKS else range(1, count)
        pairs = [(group[i], group[(i + step) % count]) for group in groups for i in range(count) for step in steps]
        paths = [cluster.path(*pair) for pair in pairs]
        latency_s = max(map(path_latency_s, paths))
        return Phase(
            1.0 if over == CONTEXT_RANKS else 1 / count, latency_s, tuple(hop for path in paths for hop in path)
        )
    ring = rings(cluster, [ring_order(cluster, tuple(sorted(group))) for group in groups], 1.0, 2)
    switches = {hub.name for hub in cluster.hubs if hub.kind == "switch"} | {each.name for each in cluster.devices}
    if all(end in switches for link, _ in ring.crossings for end in (link.a, link.b)):
        return evolve(ring, latency_s=min(ring.latency_s, RING_START_S + 2 * (count - 1) * NVLINK_HOP_S))
    return ring


@lru_cache(maxsize=64)
def grouped(
    cluster: Cluster, groups: tuple[tuple[int, ...], ...], context: int = 1, experts: int = 1
) -> GroupedCluster:
    """The cluster of these groups; devices in none of the groups become hubs, which paths may cross.

    Raises:
        RequestError: the devices of a group differ in type or memory.
    """
    for group in groups:
        first = cluster.devices[group[0]]
        for other in (cluster.devices[number] for number in group[1:]):
            if (other.type, other.memory_bytes) != (first.type, first.memory_bytes):
                raise RequestError(
                    f"devices '{first.name}' and '{other.name}' are ranks of one stage and differ in type or "
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
        context,
        experts,
    )


def consecutive_groups(cluster: Cluster, tensor: int, context: int = 1, experts: int = 1) -> GroupedCluster:
    """The cluster with every tensor × context × experts consecutive devices as a group.

    Raises:
        RequestError: these do not divide the number of devices, or the devices of a group differ.
    """
    count, width = len(cluster.devices), tensor * context * experts
    if min(tensor, context, experts) < 1 or count % width:
        kinds = ((tensor, "tensor"), (context, "context"), (experts, "expert"))
        what = " × ".join(f"{number} {kind}" for number, kind in kinds if number != 1) or f"{tensor} tensor"
        raise RequestError(f"{what} ranks do not divide the {count} devices of the cluster: give a divisor of {count}")
    groups = tuple(tuple(range(first, first + width)) for first in range(0, count, width))
    return grouped(cluster, groups, context, experts)
