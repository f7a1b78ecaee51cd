"""A cluster as an SVG: a card for each kind of node with its devices and hubs in rows, and the network below.

The SVG is self-contained. Hovering over a link shows its ends and its rate. A wider line is a faster link: a factor of
ten is 2 pixels.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape

from attrs import frozen

from ...cluster.cluster import Cluster
from ...cluster.routing import Link
from ...cluster.topology import Node, Topology, topology_of
from .steps import px, svg_document

STEP, WIDE, TALL, ROW = 92.0, 74.0, 26.0, 70.0
"""Pixels: from box to box, width and height of a box, and from row to row."""
LEFT, PAD, TITLE = 24.0, 22.0, 70.0
"""Pixels: the margin and the gap between cards, the padding inside a card, the space above the cards."""
BELOW = ("pcie", "nic", "host")
"""Kinds of hubs in the rows below a node's devices."""

COLOURS = {"device": "#2a6fb0", "switch": "#1f9c7f", "pcie": "#7b8794", "host": "#59616b", "nic": "#c98a17"}
STYLE = """
text{font:11px ui-sans-serif,system-ui,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;fill:#1c2127}
.t{font-size:18px;font-weight:650}.s{fill:#5d6670}.m{text-anchor:middle}.e{text-anchor:end}.w{fill:#fff}
.r{font-size:9px;paint-order:stroke;stroke:#faf9f6;stroke-width:3px;fill:#5d6670}.card{fill:#faf9f6;stroke:#dcd8cf}path{fill:none;stroke:#9aa3ad}path:hover{stroke:#b8432f}
""".replace("\n", "")


@frozen
class Box:
    """A device or hub in the picture: its centre and width in pixels, and a second line of text."""

    kind: str
    label: str
    x: float
    y: float
    width: float = WIDE
    more: str = ""

    def clamped(self, x: float) -> float:
        """The place of the box that is nearest to ``x``."""
        return min(max(x, self.x - self.width / 2), self.x + self.width / 2)

    def drawn(self) -> str:
        """The SVG."""
        text = f'<rect x="{px(self.x - self.width / 2)}" y="{px(self.y - TALL / 2)}" width="{px(self.width)}" '
        text += f'height="{px(TALL)}" rx="5" fill="{COLOURS[self.kind]}"/>'
        for line, y in ((self.label, self.y + (0 if self.more else 4)), (self.more, self.y + 10)):
            size = ' style="font-size:9px"' if line == self.more else ""
            text += f'<text class="m w"{size} x="{px(self.x)}" y="{px(y)}">{escape(line)}</text>' if line else ""
        return text


def topology_svg(name: str, cluster: Cluster) -> str:
    """The picture of a cluster. The same input gives the same bytes."""
    topology = topology_of(cluster)
    types = {device.name: device.type or "" for device in cluster.devices}
    near: dict[str, list[str]] = {each: [] for each in topology.kinds}
    for link in cluster.links:
        near[link.a].append(link.b)
        near[link.b].append(link.a)
    boxes: dict[str, Box] = {}
    cards, left, bottom = [], LEFT, TITLE
    for group in topology.groups:
        own = _node(group[0], topology.kinds, near, types, left)
        right, low = max(box.x + box.width / 2 for box in own.values()) + PAD, max(box.y for box in own.values()) + 30
        title = _title(group, topology)
        right = max(right, left + 2 * PAD + 6.2 * len(title))
        cards.append(
            f'<rect class="card" x="{px(left)}" y="{px(TITLE)}" width="{px(right - left)}" '
            f'height="{px(low - TITLE)}" rx="10"/><text class="s" x="{px(left + PAD)}" y="{px(TITLE + 20)}">'
            f"{escape(title)}</text>"
        )
        boxes |= own
        left, bottom = right + LEFT, max(bottom, low)
    for level in topology.network:
        bottom += ROW
        wanted = [(_middle(boxes, near[switch], LEFT + STEP), switch) for switch in level]
        for (_, switch), x in zip(sorted(wanted), _spread(sorted(x for x, _ in wanted)), strict=True):
            boxes[switch] = Box("switch", switch, x, bottom)
    width = max(left, 560.0, *(box.x + box.width for box in boxes.values()))
    parts = (*_head(name, topology, cluster), *cards, *_links(cluster, topology, boxes))
    return svg_document(name, STYLE, (width, bottom + 40), (*parts, *(box.drawn() for box in boxes.values())))


def _title(group: Sequence[Node], topology: Topology) -> str:
    if len(topology.nodes) == 1:
        return ""
    first, last = (
        node.prefix.rstrip("./:-_") or f"node {topology.nodes.index(node)}" for node in (group[0], group[-1])
    )
    return first if len(group) == 1 else f"{first} … {last}: {len(group)} equal nodes"


def _node(
    node: Node, kinds: Mapping[str, str], near: Mapping[str, Sequence[str]], types: Mapping[str, str], left: float
) -> dict[str, Box]:
    """The boxes of a node: switches between its devices, these in a row, and other hubs below."""
    rows = {kind: [name for name in node.names if kinds[name] == kind] for kind in ("device", "switch", *BELOW)}
    y = TITLE + 30 + TALL / 2 + ROW * len(rows["switch"])
    boxes = {
        name: Box("device", name.removeprefix(node.prefix), left + PAD + STEP * (place + 0.5), y, more=types[name])
        for place, name in enumerate(rows["device"])
    }
    for level, name in enumerate(rows["switch"]):
        ends = [boxes[other].x for other in near[name] if other in boxes] or [left + PAD + STEP / 2]
        centre, width = (min(ends) + max(ends)) / 2, max(ends) - min(ends) + WIDE
        boxes[name] = Box("switch", name.removeprefix(node.prefix), centre, y - ROW * (level + 1), width)
    for kind in BELOW:
        if rows[kind]:
            y += ROW
            wanted = [_middle(boxes, near[name], left + PAD + STEP / 2) for name in rows[kind]]
            for name, x in zip(rows[kind], _spread(wanted), strict=True):
                boxes[name] = Box(kind, name.removeprefix(node.prefix), x, y)
    return boxes


def _middle(boxes: Mapping[str, Box], near: Sequence[str], otherwise: float) -> float:
    """The mean place of what a hub is linked to."""
    places = [boxes[name].x for name in near if name in boxes]
    return sum(places) / len(places) if places else otherwise


def _spread(wanted: Sequence[float]) -> list[float]:
    """The places from left to right, moved so that boxes do not overlap."""
    found: list[float] = []
    for x in wanted:
        found.append(max(x, found[-1] + STEP) if found else x)
    return found


def _links(cluster: Cluster, topology: Topology, boxes: Mapping[str, Box]) -> list[str]:
    """All links between boxes, and the rate of the first of each kind."""
    lines, rates, known = [], [], set()
    for link in cluster.links:
        if link.a not in boxes or link.b not in boxes:
            continue
        a, b = boxes[link.a], boxes[link.b]
        # Upright, where one box is much wider than the other.
        start = a.clamped(b.x) if a.width > b.width else a.x
        end = b.clamped(a.x) if b.width > a.width else b.x
        arc = f"Q{px((start + end) / 2)} {px(a.y - ROW)} {px(end)} {px(b.y)}"
        lines.append(_link(link, f"M{px(start)} {px(a.y)}{arc if a.y == b.y else f'L{px(end)} {px(b.y)}'}"))
        kind = (frozenset((topology.kinds[link.a], topology.kinds[link.b])), link.bytes_per_s)
        if kind not in known:
            known.add(kind)
            x, y = (start + end) / 2 + 4, (a.y + b.y) / 2 + (3 if a.y != b.y else -22)
            rates.append(f'<text class="r" x="{px(x)}" y="{px(y)}">{link.bytes_per_s / 1e9:.4g} GB/s</text>')
    return [*lines, *rates]


def _link(link: Link, way: str) -> str:
    """A link along an SVG path; its width grows with the link's rate."""
    wide = max(1.0, 2.0 * math.log10(max(link.bytes_per_s, 1.0) / 1e9) + 0.5)
    way_out, back = (f"{link.rate(from_a) / 1e9:.4g} GB/s" for from_a in (True, False))
    rates = f"{way_out} in each direction" if way_out == back else f"{way_out}, back {back}"
    rate = f"{rates}, {link.latency_s * 1e6:.3g} µs"
    return f'<path d="{way}" stroke-width="{px(wide)}"><title>{escape(f"{link.a} – {link.b}: {rate}")}</title></path>'


def _head(name: str, topology: Topology, cluster: Cluster) -> tuple[str, str]:
    nodes = f"{len(topology.nodes)} nodes · " if len(topology.nodes) > 1 else ""
    slow, fast = (pick((link.bytes_per_s for link in cluster.links), default=0.0) for pick in (min, max))
    rates = f" · links of {slow / 1e9:.4g} to {fast / 1e9:.4g} GB/s in each direction" if cluster.links else ""
    return (
        f'<text class="t" x="{px(LEFT)}" y="32">{escape(name)}</text>',
        f'<text class="s" x="{px(LEFT)}" y="52">{nodes}{len(cluster.devices)} devices{rates}</text>',
    )
