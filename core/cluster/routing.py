"""Paths through a cluster: which links a transfer crosses.

A transfer takes the path with the least latency; of equal ones, one with the fewest links. Where several are still
equal, the number of the destination device selects one at each branch, so that the GPUs of a PCIe switch with two NICs
use both. Rates do not matter: a pair has one path for messages of every size, and therefore one latency and one rate,
as the search and the cluster file's contract assume. A path with more latency and a higher rate is not taken.

A path between two devices never turns around at PCIe switches or NICs: it passes a host, a switch (NVSwitch, network)
or a cable between two NICs. So transfers between GPUs without NVLink are staged through host memory, as on machines
without peer-to-peer access, while a GPU reaches a NIC through its PCIe switch. ::

    allowed:    gpu0 ─ pcie0 ─ host0 ─ pcie1 ─ gpu2        gpu0 ─ pcie0 ─ nic0 ─ rail0 ─ nic0' ─ pcie0' ─ gpu0'
    forbidden:  gpu0 ─ pcie0 ─ gpu1                        gpu0 ─ pcie0 ─ nic0 ─ pcie0 ─ gpu1

A path crosses no device between its ends, unless that device forwards: a GPU moves data between two of its links only
where a program on it copies them.

The graph that is searched has two states for each place. Of a hub: reached from a device through PCIe switches and
NICs alone (*inside*), and reached otherwise; no step leads from an inside state to a device. Of a device: where a path
starts, and where it arrives; steps leave an arrival only at a device that forwards.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from copy import copy
from functools import cached_property
from math import floor, inf, log10
from typing import Any

import networkx
import numpy
from attrs import frozen

FEW_STATES = 200
"""Largest number of states of a graph that is searched in Python: importing scipy's sparse graphs takes as long as
hundreds of such searches."""
INSIDE_KINDS = ("pcie", "nic")
"""Kinds of hubs among which a path between devices may not turn around."""
PICOSECONDS = 1e12
LINKS = 1024
"""A link's length is its latency in picoseconds × this + 1: whole numbers, so that equal paths compare as equal."""
EXACT = 2**53
"""Up to this, floats hold all whole numbers. Where latencies are of seconds, the unit is a larger power of ten."""


@frozen
class Link:
    """A link between two devices or hubs.

    Args:
        a, b: names of its ends.
        bytes_per_s: rate in each direction.
        latency_s: seconds.
        back_bytes_per_s: rate from b to a, where it differs; ``bytes_per_s`` is then the rate from a to b.
        both_bytes_per_s: rate of both directions together, where they share it; None where neither slows the other.
    """

    a: str
    b: str
    bytes_per_s: float
    latency_s: float
    back_bytes_per_s: float | None = None
    both_bytes_per_s: float | None = None

    def rate(self, from_a: bool) -> float:
        """Bytes/s in one direction while the other is idle."""
        back = self.back_bytes_per_s
        rate = self.bytes_per_s if from_a or back is None else back
        return rate if self.both_bytes_per_s is None else min(rate, self.both_bytes_per_s)


Hop = tuple[Link, bool]
"""A link and the direction in which it is crossed (True from a to b)."""


class ParallelPath(tuple[Hop, ...]):
    """The paths of a group of devices, each with a message at the same time; the tuple lists the paths' links in turn.

    Attributes:
        latency_s: of the slowest path.
        bytes_per_s: rate of each path while nothing else uses its links.
    """

    latency_s: float
    bytes_per_s: float

    @classmethod
    def of(cls, paths: Sequence[Sequence[Hop]]) -> "ParallelPath":
        """The paths together."""
        found = cls(hop for path in paths for hop in path)
        found.latency_s = max((path_latency_s(path) for path in paths), default=0.0)
        found.bytes_per_s = shared_rate(found)
        return found


def shared_rate(crossings: Sequence[Hop]) -> float:
    """Bytes/s of each of several equal flows that together cross these links, each link as often as it is listed."""
    counts = Counter(crossings)
    both = [
        link.both_bytes_per_s / (count + counts.get((link, not from_a), 0))
        for (link, from_a), count in counts.items()
        if link.both_bytes_per_s is not None
    ]
    return min([*(link.rate(from_a) / count for (link, from_a), count in counts.items()), *both], default=inf)


def path_rate(path: Sequence[Hop]) -> float:
    """Bytes/s of a path while nothing else uses its links: that of the slowest one; infinite for no link."""
    if isinstance(path, ParallelPath):
        return path.bytes_per_s
    if len({id(link) for link, _ in path}) < len(path):  # staged: the host's memory is crossed twice
        return shared_rate(path)
    return min([link.rate(from_a) for link, from_a in path], default=inf)


def path_latency_s(path: Sequence[Hop]) -> float:
    """Latency of a path: the sum over its links."""
    if isinstance(path, ParallelPath):
        return path.latency_s
    return sum([link.latency_s for link, _ in path])


def reverse(path: Sequence[Hop]) -> tuple[Hop, ...]:
    """The same links from the end to the start."""
    return tuple((link, not from_a) for link, from_a in reversed(path))


class Router:
    """Shortest paths from one place at a time, computed when first needed.

    Args:
        names: names of all places (devices and hubs), the devices first.
        kinds: for each place None for a device, otherwise the hub's kind.
        links: the links between them.
        forwarding: places of the devices that paths may cross.
    """

    def __init__(
        self,
        names: Sequence[str],
        kinds: Sequence[str | None],
        links: Sequence[Link],
        forwarding: Collection[int] = frozenset(),
    ) -> None:
        numbers = {name: number for number, name in enumerate(names)}
        self.kinds = kinds
        self.hops: list[tuple[Hop, Hop]] = [((link, False), (link, True)) for link in links]
        """Of each link its two directions: paths share them, of which a large cluster has millions."""
        self.states = 2 * len(names)
        self.steps: list[list[tuple[int, float, int]]] = [[] for _ in range(self.states)]
        """By state (2 × the place's number, + 1 inside or at a path's start): each state before it, the link's length,
        the link's index."""
        slowest = max((link.latency_s for link in links), default=0.0)
        most = EXACT / LINKS / max(LINKS, self.states)  # no path has as many links as there are states
        units = PICOSECONDS if slowest * PICOSECONDS <= most else 10.0 ** floor(log10(most / slowest))
        for index, link in enumerate(links):
            length = round(link.latency_s * units) * LINKS + 1
            for a, b in ((numbers[link.a], numbers[link.b]), (numbers[link.b], numbers[link.a])):
                arrived = kinds[a] is None and a not in forwarding
                for before in (2 * a + 1,) if arrived else (2 * a, 2 * a + 1):
                    after = self._step(before, b)
                    if after is not None:
                        self.steps[after].append((before, float(length), index))
        self.ends = [numbers[link.a] for link in links]
        self._order: Sequence[int] = range(len(names))
        self._lengths: dict[int, Any] = {}
        self._known: dict[tuple[int, int], list[tuple[int, float, int]]] = {}

    def arranged(self, order: Sequence[int]) -> "Router":
        """The same paths between the same devices under other numbers: per device its present one.

        A device's number selects one of several equal paths, so the search keeps the original numbers.
        """
        _ = self._search  # of all arrangements
        other = copy(self)
        other._order = [self._order[number] for number in order]
        return other

    def path(self, src: int, dst: int) -> tuple[Hop, ...] | None:
        """The links from device ``src`` to device ``dst``; None if nothing connects them."""
        here, there = self._order[src], self._order[dst]
        return self._walk(here, 2 * there, spread=there)

    def nearest(self, src: int, kind: str) -> tuple[Hop, ...] | None:
        """The links from device ``src`` to the nearest hub of a kind; None if it reaches none."""
        src = self._order[src]
        lengths = self._from(src)
        ends = [2 * place for place, known in enumerate(self.kinds) if known == kind]
        end = min(ends, key=lambda end: float(lengths[end]), default=None)
        return None if end is None else self._walk(src, end, spread=src)

    def _walk(self, src: int, state: int, spread: int) -> tuple[Hop, ...] | None:
        """Follow the shortest path back from a state to its source."""
        if state == 2 * src:
            return ()
        lengths = self._from(src)
        if numpy.isinf(lengths[state]):
            return None
        hops: list[Hop] = []
        while state != self._start(src):
            equal = self._last_steps(src, state)
            state, _, index = equal[spread % len(equal)]
            hops.append(self.hops[index][self.ends[index] == state // 2])
        return tuple(reversed(hops))

    def _last_steps(self, src: int, state: int) -> list[tuple[int, float, int]]:
        """The last steps of all shortest paths from a place to a state, of ``steps``."""
        if (src, state) not in self._known:
            lengths, steps = self._from(src), self.steps[state]
            sums = [lengths[before] + length for before, length, _ in steps]
            least = min(sums)
            self._known[src, state] = [step for step, length in zip(steps, sums, strict=True) if length == least]
        return self._known[src, state]

    def _from(self, src: int) -> Any:
        """The length of the shortest path from a place to every state."""
        if src not in self._lengths:
            self._lengths[src] = self._search(self._start(src))
        return self._lengths[src]

    @cached_property
    def _search(self) -> Callable[[int], Any]:
        """A state → the length of the shortest path from it to every state."""
        steps = [(before, after, length) for after, each in enumerate(self.steps) for before, length, _ in each]
        if self.states <= FEW_STATES:
            graph: networkx.DiGraph[int] = networkx.DiGraph()
            graph.add_nodes_from(range(self.states))
            graph.add_weighted_edges_from(steps)

            def few(start: int) -> list[float]:
                found = networkx.single_source_dijkstra_path_length(graph, start)
                return [found.get(state, inf) for state in range(self.states)]

            return few
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import dijkstra

        rows, columns, lengths = numpy.array(steps, dtype=float).reshape(-1, 3).T
        places = rows.astype(int), columns.astype(int)
        matrix = csr_array((lengths, places), shape=(self.states, self.states))
        return lambda start: dijkstra(matrix, indices=start)

    def _start(self, place: int) -> int:
        """The state in which paths from a place start."""
        return 2 * place + int(self.kinds[place] is None)

    def _step(self, state: int, there: int) -> int | None:
        """The state that a step to a place leads to; None if it is forbidden."""
        here, inside = divmod(state, 2)
        kind, to = self.kinds[here], self.kinds[there]
        if to is None:
            return None if inside and kind is not None else 2 * there
        if to not in INSIDE_KINDS or (kind == "nic" and to == "nic"):
            return 2 * there
        return 2 * there + int(kind is None or bool(inside))
