"""A cluster as an SVG: a card for each kind of node with its devices in columns, and the network below.

The SVG is self-contained. Hovering over a link shows its ends and its rate. A wider line is a faster link: a factor of
ten is 2 pixels.
"""

import math
from collections.abc import Iterator, Sequence
from html import escape

from attrs import frozen

from ...cluster.cluster import Cluster
from ...cluster.routing import Link
from ...cluster.topology import NodeView, Topology, topology_of
from .steps import px

STEP, BOX, TALL = 92.0, 74.0, 34.0
"""Pixels: from device to device, width and height of a device."""
LEFT, PAD, TITLE = 24.0, 22.0, 70.0
"""Pixels: the left margin, the padding inside a card, the space above the first card."""
LEVEL = 62.0
"""Pixels from one level of a node to the next one."""
NIC = 24.0
"""Pixels: height of a NIC and the gap below it."""
RAIL = 26.0
"""Pixels from one switch of the network to the next one."""
NODES_SHOWN = 16
"""Most nodes with a column in the network; of more, the first ones and the last one are shown."""

COLOURS = {"device": "#2a6fb0", "switch": "#1f9c7f", "pcie": "#7b8794", "host": "#59616b", "nic": "#c98a17"}
STYLE = """
text{font:11px ui-sans-serif,system-ui,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;fill:#1c2127}
.t{font-size:18px;font-weight:650}.s{fill:#5d6670}.m{text-anchor:middle}.e{text-anchor:end}.w{fill:#fff}
.r{font-size:9px;fill:#5d6670}.card{fill:#faf9f6;stroke:#dcd8cf}path{fill:none;stroke:#9aa3ad}path:hover{stroke:#b8432f}
""".replace("\n", "")


@frozen
class Pen:
    """Draws the links of one node.

    Args:
        links: by the names of their ends.
        prefix: of the names in the node.
    """

    links: dict[frozenset[str], Link]
    prefix: str

    def line(self, a: str, b: str, way: str) -> str:
        """A link along an SVG path; empty if there is no such link."""
        link = self.links.get(frozenset((self.prefix + a, self.prefix + b)))
        return "" if link is None else link_path(link, way)

    def rate(self, a: str, b: str, x: float, y: float) -> str:
        """The rate of a link, as text next to it."""
        link = self.links.get(frozenset((self.prefix + a, self.prefix + b)))
        if link is None:
            return ""
        return f'<text class="r" x="{px(x)}" y="{px(y)}">{link.bytes_per_s / 1e9:.4g} GB/s</text>'


def link_path(link: Link, way: str) -> str:
    """A link along an SVG path; its width grows with the link's rate."""
    wide = max(1.0, 2.0 * math.log10(max(link.bytes_per_s, 1.0) / 1e9) + 0.5)
    way_out, back = (f"{link.rate(from_a) / 1e9:.4g} GB/s" for from_a in (True, False))
    rates = f"{way_out} in each direction" if way_out == back else f"{way_out}, back {back}"
    rate = f"{rates}, {link.latency_s * 1e6:.3g} µs"
    return f'<path d="{way}" stroke-width="{px(wide)}"><title>{escape(f"{link.a} – {link.b}: {rate}")}</title></path>'


def topology_svg(name: str, cluster: Cluster) -> str:
    """The picture of a cluster. The same input gives the same bytes.

    Args:
        name: its title.
        cluster: the cluster; equal nodes are drawn once.
    """
    topology = topology_of(cluster)
    types = [device.type for device in cluster.devices]
    links = {frozenset((link.a, link.b)): link for link in cluster.links}
    parts: list[str] = []
    y, width = TITLE, 560.0
    for group in topology.groups(types):
        node = topology.nodes[group[0]]
        title = topology.names[group[0]] if len(topology.nodes) > 1 else ""
        if len(group) > 1:
            title += f" … {topology.names[group[-1]]}: {len(group)} equal nodes"
        height = _node_height(node)
        wide = 2 * PAD + STEP * len(node.devices) if node.drawn else 500.0
        parts += [
            f'<g transform="translate({px(LEFT)} {px(y)})"><rect class="card" width="{px(wide)}" '
            f'height="{px(height)}" rx="10"/>',
            f'<text class="s" x="{px(PAD)}" y="20">{escape(title)}</text>',
            *(_node(node, types, Pen(links, node.prefix)) if node.drawn else _words(cluster, node)),
            "</g>",
        ]
        y += height + 18
        width = max(width, wide)
    drawn, height, wide = _network(topology, links)
    if drawn:
        parts += [f'<g transform="translate({px(LEFT)} {px(y)})">', *drawn, "</g>"]
        y, width = y + height, max(width, wide)
    return _page(name, cluster, topology, parts, (width + 2 * LEFT, y + 12))


def _page(name: str, cluster: Cluster, topology: Topology, parts: Sequence[str], size: tuple[float, float]) -> str:
    width, height = map(px, size)
    nodes = f"{len(topology.nodes)} nodes · " if len(topology.nodes) > 1 else ""
    slow, fast = (pick((link.bytes_per_s for link in cluster.links), default=0.0) for pick in (min, max))
    rates = f" · links of {slow / 1e9:.4g} to {fast / 1e9:.4g} GB/s in each direction" if cluster.links else ""
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img"><title>{escape(name)}</title><style>{STYLE}</style>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text class="t" x="{px(LEFT)}" y="32">{escape(name)}</text>',
        f'<text class="s" x="{px(LEFT)}" y="52">{nodes}{len(cluster.devices)} devices{rates}</text>',
    ]
    return "\n".join(part for part in (*head, *parts, "</svg>") if part) + "\n"


def _box(kind: str, label: str, x: float, y: float, width: float, height: float, below: str = "") -> Iterator[str]:
    """A box whose upper edge is centred at x, y, with an optional second line of text."""
    yield (
        f'<rect x="{px(x - width / 2)}" y="{px(y)}" width="{px(width)}" height="{px(height)}" rx="5" '
        f'fill="{COLOURS[kind]}"/>'
    )
    middle = y + height / 2 + (4 if not below else -2)
    yield f'<text class="m w" x="{px(x)}" y="{px(middle)}">{escape(label)}</text>'
    if below:
        yield f'<text class="m w" style="font-size:9px" x="{px(x)}" y="{px(middle + 12)}">{escape(below)}</text>'


def _levels(node: NodeView) -> tuple[float, float, float]:
    """Upper edges of devices, PCIe switches and hosts in a card."""
    devices = 32 + 40 * len(node.switches) + 26 * bool(node.bridges)
    nics = max((len(branch.nics) for branch in node.branches), default=0)
    pcie = devices + LEVEL
    return devices, pcie, pcie + LEVEL + NIC * max(nics - 1, 0)


def _node_height(node: NodeView) -> float:
    if not node.drawn:
        return 60.0
    devices, _, hosts = _levels(node)
    return (hosts + 26 if node.hosts else devices + TALL) + (40 if node.host_links else 18)


def _node(node: NodeView, types: Sequence[str | None], pen: Pen) -> Iterator[str]:
    """Links first, so that boxes are drawn over them."""
    centres = [PAD + STEP * place + STEP / 2 for place in range(len(node.devices))]
    middles = [sum(centres[place] for place in branch.devices) / len(branch.devices) for branch in node.branches]
    boxes: list[str] = []
    yield from _between_devices(node, pen, centres, boxes)
    yield from _branches(node, pen, centres, middles, boxes)
    yield from _hosts(node, pen, middles, boxes)
    for number, device, centre in zip(node.numbers, node.devices, centres, strict=True):
        boxes += _box("device", device, centre, _levels(node)[0], BOX, TALL, types[number] or "")
    yield from boxes
    yield from _rates(node, pen, centres, middles)


def _between_devices(node: NodeView, pen: Pen, centres: Sequence[float], boxes: list[str]) -> Iterator[str]:
    """Switches above the devices, and arcs over bridged pairs."""
    top = _levels(node)[0]
    for level, (switch, places) in enumerate(node.switches):
        y = 32 + 40.0 * level
        xs = [centres[place] for place in places] or [centres[0]]
        for place in places:
            yield pen.line(node.devices[place], switch, f"M{px(centres[place])} {px(y + 20)}V{px(top)}")
        boxes += _box("switch", switch, (xs[0] + xs[-1]) / 2, y, xs[-1] - xs[0] + BOX, 22)
    for first, second in node.bridges:
        left, right, above = px(centres[first]), px(centres[second]), px(top - 30)
        way = f"M{left} {px(top)}C{left} {above} {right} {above} {right} {px(top)}"
        yield pen.line(node.devices[first], node.devices[second], way)


def _branches(
    node: NodeView, pen: Pen, centres: Sequence[float], middles: Sequence[float], boxes: list[str]
) -> Iterator[str]:
    """PCIe switches with their NICs."""
    at_device, at_pcie, at_host = _levels(node)
    for branch, middle in zip(node.branches, middles, strict=True):
        up, end = (branch.pcie, at_pcie) if branch.pcie else (branch.host or "", at_host)
        for place in branch.devices:
            way = f"M{px(centres[place])} {px(at_device + TALL)}L{px(middle)} {px(end)}"
            yield pen.line(node.devices[place], up, way)
        if branch.pcie is None:
            continue
        yield pen.line(branch.pcie, branch.host or "", f"M{px(middle)} {px(at_pcie + 22)}V{px(at_host)}")
        boxes += _box("pcie", branch.pcie, middle, at_pcie, BOX, 22)
        for number, nic in enumerate(branch.nics):
            y = at_pcie + 30 + NIC * number
            yield pen.line(branch.pcie, nic, f"M{px(middle)} {px(at_pcie + 22)}V{px(y + 9)}H{px(middle + 10)}")
            boxes += _box("nic", nic, middle + 26, y, 36, 18)


def _hosts(node: NodeView, pen: Pen, middles: Sequence[float], boxes: list[str]) -> Iterator[str]:
    """Hosts under their branches, and the links between them."""
    y = _levels(node)[2]
    below = {
        host: [middle for middle, branch in zip(middles, node.branches, strict=True) if branch.host == host]
        for host in node.hosts
    }
    for a, b in node.host_links:
        if below[a] and below[b]:
            left, right = ((below[host][0] + below[host][-1]) / 2 for host in (a, b))
            yield pen.line(a, b, f"M{px(left)} {px(y + 24)}V{px(y + 42)}H{px(right)}V{px(y + 24)}")
            yield pen.rate(a, b, (left + right) / 2 - 18, y + 38)
    for host, xs in below.items():
        if xs:
            boxes += _box("host", host, (xs[0] + xs[-1]) / 2, y, xs[-1] - xs[0] + BOX, 26)


def _rates(node: NodeView, pen: Pen, centres: Sequence[float], middles: Sequence[float]) -> Iterator[str]:
    """Rates of the first links of each level."""
    at_device, at_pcie, at_host = _levels(node)
    for level, (switch, places) in enumerate(node.switches):
        for place in places[:1]:
            yield pen.rate(node.devices[place], switch, centres[place] + 6, 66 + 40.0 * level)
    for a, b in node.bridges[:1]:
        yield pen.rate(node.devices[a], node.devices[b], centres[a] + 24, at_device - 8)
    for branch, middle in zip(node.branches[:1], middles, strict=False):
        first = branch.devices[0]
        side = centres[first] - 36 if len(branch.devices) > 1 else middle + 6
        yield pen.rate(node.devices[first], branch.pcie or branch.host or "", side, at_pcie - 6)
        yield pen.rate(branch.pcie or "", branch.host or "", middle - 42, at_host - 8)


def _words(cluster: Cluster, node: NodeView) -> Iterator[str]:
    """The text for a node that cannot be drawn as a tree."""
    names = {cluster.devices[number].name for number in node.numbers}
    count = sum(bool({link.a, link.b} & names) for link in cluster.links)
    yield f'<text x="{px(PAD)}" y="40">{len(names)} devices with {count} links between them</text>'


def _network(topology: Topology, links: dict[frozenset[str], Link]) -> tuple[list[str], float, float]:
    """A row for each switch with NICs, a column for each node; and the height and width of the drawing."""
    rails = [rail for rail in topology.rails if any(rail.nics)]
    if not rails:
        return [], 0.0, 0.0
    count = len(topology.nodes)
    shown = list(range(count)) if count <= NODES_SHOWN else [*range(NODES_SHOWN - 2), count - 1]
    wide = max(46.0, 14 + 6.2 * max(len(",".join(nics)) for rail in rails for nics in rail.nics))
    columns = [PAD + 70 + (wide + 22) * (place + 0.5) for place in range(len(shown))]
    right = columns[-1] + (wide + 22) / 2 + 16
    lines, boxes = [], []
    for x, number in zip(columns, shown, strict=True):
        boxes.append(f'<text class="m s" x="{px(x)}" y="12">{escape(topology.names[number])}</text>')
    if len(shown) < count:
        between = (columns[-2] + columns[-1]) / 2
        boxes.append(f'<text class="m s" x="{px(between)}" y="12">…</text>')
    ups = list(dict.fromkeys(up for rail in rails for up in rail.up))
    for level, rail in enumerate(rails):
        y = 26 + RAIL * level
        for x, number in zip(columns, shown, strict=True):
            prefix = topology.nodes[number].prefix
            ends = [links.get(frozenset((rail.switch, prefix + nic))) for nic in rail.nics[number]]
            lines += [link_path(link, f"M{px(PAD + 60)} {px(y + 10)}H{px(x)}") for link in ends if link is not None]
            if rail.nics[number]:
                boxes += _box("nic", ",".join(rail.nics[number]), x, y + 1, wide, 18)
        for up in rail.up:
            link = links.get(frozenset((rail.switch, up)))
            if link is not None:
                lines.append(link_path(link, f"M{px(PAD + 60)} {px(y + 10)}H{px(right)}"))
        boxes += _box("switch", rail.switch, PAD + 30, y, 64, 20)
    height = 26 + RAIL * len(rails)
    for number, up in enumerate(ups):
        boxes += _box("switch", up, right + 30 + 72 * number, 24, 60, height - 28)
    return [*lines, *boxes], height + 10, right + 72 * max(len(ups), 1)
