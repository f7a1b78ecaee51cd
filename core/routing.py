"""Paths through a cluster: which links a transfer crosses.

The path of least latency, then that of fewest links. Of several equal ones the transfers take different ones: at each
place that equal paths lead to, the number of the device that they go to chooses, so that the GPUs behind a PCIe switch
with two NICs use both.

A path between two devices never turns around among PCIe switches and NICs: it passes a host, a switch (NVSwitch,
network) or a cable between two NICs. So transfers between GPUs without NVLink are staged through host memory, as they
are on machines whose GPUs may not reach each other directly, while a GPU reaches a NIC through its PCIe switch. ::

    allowed:    gpu0 ─ pcie0 ─ host0 ─ pcie1 ─ gpu2        gpu0 ─ pcie0 ─ nic0 ─ rail0 ─ nic0' ─ pcie0' ─ gpu0'
    forbidden:  gpu0 ─ pcie0 ─ gpu1                        gpu0 ─ pcie0 ─ nic0 ─ pcie0 ─ gpu1

For the search a place stands twice in the graph: as it is reached from a device through PCIe switches and NICs alone
(*inside*), and as it is reached otherwise. A device cannot be reached from inside.
"""

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .cluster import Link

INSIDE_KINDS = ("pcie", "nic")
"""Kinds of hubs among which a path between devices may not turn around."""
FEMTOSECONDS = 1e15
LINKS = 1 << 20
"""A path has fewer links than that: its length is femtoseconds × this + links, one exact integer."""

Hop = tuple["Link", bool]
"""A link, and whether it is crossed from its a to its b."""


class Router:
    """Shortest paths from one place at a time, computed when first asked for.

    Args:
        names: of all places, the devices first.
        kinds: of all places: None for a device, else the hub's kind.
        links: between them.
    """

    def __init__(self, names: Sequence[str], kinds: Sequence[str | None], links: Sequence["Link"]) -> None:
        self.numbers = {name: number for number, name in enumerate(names)}
        self.kinds = list(kinds)
        self.links = links
        self.neighbours: list[list[tuple[int, int, int]]] = [[] for _ in names]
        for index, link in enumerate(links):
            a, b = self.numbers[link.a], self.numbers[link.b]
            length = round(link.latency_s * FEMTOSECONDS) * LINKS + 1
            self.neighbours[a].append((b, length, index))
            self.neighbours[b].append((a, length, index))
        self._found: dict[int, tuple[dict[int, int], dict[int, list[tuple[int, int]]]]] = {}

    def path(self, src: int, dst: int) -> tuple[Hop, ...] | None:
        """The links from place ``src`` to device ``dst``; None if nothing connects them."""
        return self._walk(src, 2 * dst, spread=dst)

    def nearest(self, src: int, kind: str) -> tuple[Hop, ...] | None:
        """The links from device ``src`` to the nearest hub of a kind; None if it reaches none."""
        lengths, _ = self._from(src)
        ends = [end for end in lengths if self.kinds[end // 2] == kind]
        return self._walk(src, min(ends, key=lambda end: (lengths[end], end)), spread=src) if ends else None

    def _walk(self, src: int, end: int, spread: int) -> tuple[Hop, ...] | None:
        lengths, before = self._from(src)
        if end not in lengths:
            return None
        hops: list[Hop] = []
        while end != 2 * src:
            choices = before[end]
            previous, index = choices[spread % len(choices)]
            link = self.links[index]
            hops.append((link, self.numbers[link.a] == previous // 2))
            end = previous
        return tuple(reversed(hops))

    def _from(self, src: int) -> tuple[dict[int, int], dict[int, list[tuple[int, int]]]]:
        """From a place: the length to every other (2 × its number, + 1 inside), and the equal last steps to it."""
        if src in self._found:
            return self._found[src]
        start = 2 * src
        lengths, before, done = {start: 0}, {start: list[tuple[int, int]]()}, set()
        queue = [(0, start)]
        while queue:
            length, here = heapq.heappop(queue)
            if here in done:
                continue
            done.add(here)
            for there, step, index in self.neighbours[here // 2]:
                end = self._step(here, there)
                if end is None:
                    continue
                known = lengths.get(end)
                if known is None or length + step < known:
                    lengths[end] = length + step
                    before[end] = [(here, index)]
                    heapq.heappush(queue, (length + step, end))
                elif length + step == known:
                    before[end].append((here, index))
        for choices in before.values():
            choices.sort(key=lambda choice: choice[1])
        self._found[src] = lengths, before
        return lengths, before

    def _step(self, here: int, there: int) -> int | None:
        """The state that a step leads to; None if it is forbidden."""
        place, inside = divmod(here, 2)
        kind, to = self.kinds[place], self.kinds[there]
        if to is None:
            return None if inside else 2 * there
        if to not in INSIDE_KINDS or (kind == "nic" and to == "nic"):
            return 2 * there
        return 2 * there + int(kind is None or bool(inside))
