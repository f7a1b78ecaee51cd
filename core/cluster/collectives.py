"""Collectives: which links all-reduce, all-gather and reduce-scatter cross, how often, and their time on idle links.

A collective is a sequence of *phases*. In a phase all members send at the same time and rate, which the slowest of
their paths sets. The next phase begins when the data has arrived. There are n members. S is the size in bytes: of one
member's tensor in an all-reduce, of the whole result of an all-gather, of the whole input of a reduce-scatter.

============  ==============  =======================================  ==========================  ===========
algorithm     operation       who sends to whom                        bytes over each             latencies
============  ==============  =======================================  ==========================  ===========
ring          all-reduce      each member to the next                  2(n−1)/n · S                2(n−1)
ring          the others      each member to the next                  (n−1)/n · S                 n−1
tree          all-reduce      up and down two binary trees at once     S/2 each way                2·⌈log2 n⌉
tree          the others      in phase k each to the 2^k-th before it  min(2^k, n−2^k)/n · S       ⌈log2 n⌉
hierarchical  all of them     rings within nodes, rings across them    as in its rings             of all rings
============  ==============  =======================================  ==========================  ===========

Rings and what they move: NCCL ("Performance reported by NCCL tests", bus bandwidth; Patarasuk and Yuan, "Bandwidth
optimal all-reduce algorithms for clusters of workstations", JPDC 2009). Double binary trees: Sanders, Speck and Träff,
"Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009; constructed as in NCCL's ``trees.cc``.
Doubling for the two others: Bruck et al., "Efficient algorithms for all-to-all communications", IEEE TPDS 1997, as in
NCCL's PAT.

Where only ``sharers`` consecutive members share a tensor, and each such group has a copy of it (hybrid sharding,
HSDP), an all-gather is one in each group, and a reduce-scatter one in each group and then an all-reduce of the parts
over the members with the same index in all groups.

A ring sends its messages in pieces, so all n edges are busy all the time. It is therefore one phase that crosses the
paths of all its edges at one rate. A link that k edges cross is crossed k times.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import lru_cache

from attrs import frozen

from .cluster import Cluster
from .routing import Hop, path_latency_s, path_rate, shared_rate


class Operation(StrEnum):
    """What a collective does."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"


class Algorithm(StrEnum):
    """How a collective moves its data."""

    RING = "ring"
    TREE = "tree"
    HIERARCHICAL = "hierarchical"


@frozen
class Phase:
    """All members send at the same time and rate.

    Args:
        bytes: bytes sent over each of the paths.
        latency_s: from the sending of the last byte to its arrival.
        crossings: the links of all paths together; a link is listed once for each crossing.
    """

    bytes: float
    latency_s: float
    crossings: tuple[Hop, ...]

    @property
    def bytes_per_s(self) -> float:
        """Rate over each path while nothing else uses its links."""
        return shared_rate(self.crossings)

    @property
    def seconds(self) -> float:
        """Seconds of the phase while nothing else uses its links."""
        return self.bytes / self.bytes_per_s + self.latency_s


def collective_s(
    cluster: Cluster,
    devices: Sequence[int],
    size_bytes: float,
    operation: Operation = Operation.ALL_REDUCE,
    algorithm: Algorithm | None = None,
    sharers: int | None = None,
) -> float:
    """Seconds of a collective while nothing else uses its links. Arguments as in ``collective_phases``."""
    return _alone_s(collective_phases(cluster, devices, size_bytes, operation, algorithm, sharers))


def collective_phases(
    cluster: Cluster,
    devices: Sequence[int],
    size_bytes: float,
    operation: Operation = Operation.ALL_REDUCE,
    algorithm: Algorithm | None = None,
    sharers: int | None = None,
) -> tuple[Phase, ...]:
    """The phases of a collective, in order; empty for one device or no bytes.

    Args:
        devices: the members' numbers in the cluster; in the order of replicas if some of them share.
        size_bytes: S.
        algorithm: None takes the one that is fastest on idle links, as NCCL's tuning does. Hierarchical becomes the
            ring if no distance divides the members into equal groups.
        sharers: number of consecutive members that share the tensor; None for all.

    Raises:
        RequestError: nothing connects two members.
    """
    if sharers is not None and sharers < len(devices) and operation is not Operation.ALL_REDUCE and size_bytes:
        groups = tuple(tuple(devices[first : first + sharers]) for first in range(0, len(devices), sharers))
        inside = _at_once(cluster, groups, size_bytes, operation)
        if operation is Operation.ALL_GATHER:
            return inside
        copies = tuple(zip(*groups, strict=True))
        return (*inside, *_at_once(cluster, copies, size_bytes / sharers, Operation.ALL_REDUCE))
    return _of_members(cluster, tuple(sorted(set(devices))), size_bytes, operation, algorithm)


@lru_cache(maxsize=4096)
def _of_members(
    cluster: Cluster, members: tuple[int, ...], size_bytes: float, operation: Operation, algorithm: Algorithm | None
) -> tuple[Phase, ...]:
    """The same for members in ascending order. Equal layers have equal collectives."""
    if len(members) < 2 or not size_bytes:
        return ()
    order = ring_order(cluster, members)
    wanted = tuple(Algorithm) if algorithm is None else (algorithm,)
    found = [_phases(cluster, order, size_bytes, operation, each) for each in wanted]
    choices = [phases for phases in found if phases is not None]
    if not choices:  # hierarchical, and all members are equally far from each other: there is one group
        return _phases(cluster, order, size_bytes, operation, Algorithm.RING) or ()
    return min(choices, key=_alone_s)


@lru_cache(maxsize=4096)
def _at_once(
    cluster: Cluster, groups: tuple[tuple[int, ...], ...], size: float, operation: Operation
) -> tuple[Phase, ...]:
    """The phases of one collective in each of some groups of equal size, at the same time; as rings or as trees."""
    orders = [ring_order(cluster, tuple(sorted(group))) for group in groups]
    each = [
        [_phases(cluster, order, size, operation, algorithm) or () for order in orders]
        for algorithm in (Algorithm.RING, Algorithm.TREE)
    ]
    return min((tuple(map(_together, zip(*phases, strict=True))) for phases in each), key=_alone_s)


def _together(phases: Sequence[Phase]) -> Phase:
    """Phases of equal size at the same time."""
    crossings = tuple(crossing for phase in phases for crossing in phase.crossings)
    return Phase(phases[0].bytes, max(phase.latency_s for phase in phases), crossings)


def _phases(
    cluster: Cluster, order: tuple[int, ...], size: float, operation: Operation, algorithm: Algorithm
) -> tuple[Phase, ...] | None:
    if algorithm is Algorithm.RING:
        return (rings(cluster, (order,), size, 2 if operation is Operation.ALL_REDUCE else 1),)
    if algorithm is Algorithm.HIERARCHICAL:
        return _hierarchical(cluster, order, size, operation)
    if operation is Operation.ALL_REDUCE:
        return (_double_tree(cluster, order, size),)
    phases = _doubling(cluster, order, size)
    return phases if operation is Operation.ALL_GATHER else phases[::-1]


def rings(cluster: Cluster, orders: Sequence[tuple[int, ...]], size: float, rounds: int) -> Phase:
    """Rings of equal length at the same time, each of ``rounds`` × (n−1) steps.

    In each step every member sends a piece of S/n to the next, and in every round a piece passes all edges but one.
    """
    count = len(orders[0])
    pairs = [(order[i], order[(i + 1) % count]) for order in orders for i in range(count)]
    latency_s = 0.0
    for order in orders:
        edges = [_latency_s(cluster, order[i], order[(i + 1) % count]) for i in range(count)]
        spared = min(sum(edges[(i + j) % count] for j in range(rounds)) for i in range(count))
        latency_s = max(latency_s, rounds * sum(edges) - spared)
    return Phase(rounds * (count - 1) / count * size, latency_s, _crossings(cluster, pairs))


def _double_tree(cluster: Cluster, order: tuple[int, ...], size: float) -> Phase:
    """Half of the bytes up and down one binary tree, half over a second one in which its leaves are inner nodes."""
    count = len(order)
    pairs = []
    latency_s = 0.0
    for second in (False, True):
        to_root = [0.0] * count
        # A parent has fewer trailing zeros left to clear: in this order it comes before its children.
        for place in sorted(range(1, count), key=lambda place: -(place & -place)):
            up = _parent(place, count)
            child, parent = (order[_in_second_tree(p, count) if second else p] for p in (place, up))
            pairs += [(child, parent), (parent, child)]
            to_root[place] = to_root[up] + max(_latency_s(cluster, *pairs[-1]), _latency_s(cluster, *pairs[-2]))
        latency_s = max(latency_s, 2 * max(to_root))
    return Phase(size / 2, latency_s, _crossings(cluster, pairs))


def _parent(place: int, count: int) -> int:
    """Parent in NCCL's binary tree, whose root is 0 and whose odd places are leaves (``ncclGetBtree``)."""
    lowest = place & -place
    up = (place ^ lowest) | (lowest << 1)
    return up if up < count else place ^ lowest


def _in_second_tree(place: int, count: int) -> int:
    """The second tree is the first one's mirror, or for an odd count moved by one (``ncclGetDtree``)."""
    return count - 1 - place if count % 2 == 0 else (place + 1) % count


def _doubling(cluster: Cluster, order: tuple[int, ...], size: float) -> tuple[Phase, ...]:
    """All-gather: each phase doubles what a member holds. In the opposite order it is a reduce-scatter."""
    count = len(order)
    phases = []
    held = 1
    while held < count:
        pairs = [(order[i], order[(i - held) % count]) for i in range(count)]
        latency_s = max(_latency_s(cluster, *pair) for pair in pairs)
        phases.append(Phase(min(held, count - held) / count * size, latency_s, _crossings(cluster, pairs)))
        held *= 2
    return tuple(phases)


def _hierarchical(
    cluster: Cluster, order: tuple[int, ...], size: float, operation: Operation
) -> tuple[Phase, ...] | None:
    """Rings within groups of near members, then rings over the members with the same index in all groups.

    The groups are those of the distance whose phases are fastest without other traffic; None if no distance divides the
    members into equal groups.
    """
    seconds = {pair: pair[0] + size / len(order) / pair[1] for pair in _near_pairs(cluster, order)}
    choices = []
    for distance in sorted(set(seconds.values()))[:-1]:
        groups = _groups(cluster, order, frozenset(pair for pair, each in seconds.items() if each <= distance))
        if 1 < len(groups) < len(order) and len({len(group) for group in groups}) == 1:
            choices.append(_in_groups(cluster, groups, size, operation))
    return min(choices, key=_alone_s, default=None)


def _in_groups(
    cluster: Cluster, groups: Sequence[tuple[int, ...]], size: float, operation: Operation
) -> tuple[Phase, ...]:
    near = len(groups[0])
    inner = [ring_order(cluster, group) for group in groups]
    across = [ring_order(cluster, tuple(group[i] for group in groups)) for i in range(near)]
    if operation is Operation.ALL_REDUCE:
        within = rings(cluster, inner, size, 1)
        return within, rings(cluster, across, size / near, 2), within
    phases = rings(cluster, inner, size, 1), rings(cluster, across, size / near, 1)
    return phases if operation is Operation.REDUCE_SCATTER else phases[::-1]


@lru_cache(maxsize=256)
def _near_pairs(cluster: Cluster, members: tuple[int, ...]) -> dict[tuple[float, float], list[tuple[int, int]]]:
    """The pairs of members with a path of some latency and rate; of two directions the one to the higher number."""
    found: dict[tuple[float, float], list[tuple[int, int]]] = {}
    for a in members:
        for b in members:
            if a != b:
                path = cluster.path(a, b)
                pairs = found.setdefault((path_latency_s(path), path_rate(path)), [])
                if a < b:
                    pairs.append((a, b))
    return found


@lru_cache(maxsize=1024)
def _groups(
    cluster: Cluster, members: tuple[int, ...], near: frozenset[tuple[float, float]]
) -> tuple[tuple[int, ...], ...]:
    """Groups of members, ascending, connected by paths of these latencies and rates."""
    import networkx  # of a hundred modules, which a pipeline of two devices does without

    graph: networkx.Graph[int] = networkx.Graph()
    graph.add_nodes_from(sorted(members))
    pairs = _near_pairs(cluster, members)
    graph.add_edges_from(pair for each in near for pair in pairs[each])
    return tuple(sorted(tuple(sorted(group)) for group in networkx.connected_components(graph)))


@lru_cache(maxsize=4096)
def ring_order(cluster: Cluster, members: tuple[int, ...]) -> tuple[int, ...]:
    """The members in the order of a ring: those of a node are next to each other.

    From each member the ring continues with the nearest remaining one, by latency, by rate, or by number. The result is
    the order whose ring is the fastest on idle links; of equal ones, the first in this list.
    """

    def rate(a: int, b: int) -> float:
        return path_rate(cluster.path(a, b))

    by_latency = _nearest_first(members, lambda a, b: (_latency_s(cluster, a, b), -rate(a, b), b))
    by_rate = _nearest_first(members, lambda a, b: (-rate(a, b), _latency_s(cluster, a, b), b))
    orders = (by_latency, by_rate, members)
    found = {order: rings(cluster, (order,), 1.0, 2) for order in orders}
    return min(orders, key=lambda order: (-found[order].bytes_per_s, found[order].latency_s))


def _nearest_first(
    members: tuple[int, ...], distance: Callable[[int, int], tuple[float, float, int]]
) -> tuple[int, ...]:
    order, left = [members[0]], set(members[1:])
    while left:
        nearest = min(left, key=lambda other: distance(order[-1], other))
        order.append(nearest)
        left.remove(nearest)
    return tuple(order)


def _alone_s(phases: Sequence[Phase]) -> float:
    return sum(phase.seconds for phase in phases)


def _latency_s(cluster: Cluster, src: int, dst: int) -> float:
    return path_latency_s(cluster.path(src, dst))


def _crossings(cluster: Cluster, pairs: Sequence[tuple[int, int]]) -> tuple[Hop, ...]:
    return tuple(crossing for pair in pairs for crossing in cluster.path(*pair))
