"""A cluster as a text drawing: each node with its devices in columns, below it the network. ::

  ┌──────┬─ nvswitch ─┬──────┐          switches between devices
gpu0   gpu1         gpu2   gpu3         bridged pairs have an arc above them
  └pcie0─┘            └pcie1─┘          PCIe switches
     ├nic0               ├nic1
     └─────── host0 ─────┘
"""

from collections.abc import Sequence

from ..core.cluster.cluster import Cluster
from ..core.cluster.topology import Branch, NodeView, Rail, Topology
from .output import seconds_text

MOST_LINKS = 40
"""Most links that are listed for a node that is not drawn."""


class Canvas:
    """Lines of characters that grow to the right and downwards."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []

    def put(self, row: int, column: int, text: str) -> None:
        """Write text at a position, over existing characters."""
        while len(self.rows) <= row:
            self.rows.append([])
        line = self.rows[row]
        line.extend(" " * (column + len(text) - len(line)))
        line[column : column + len(text)] = text

    def centred(self, row: int, column: int, text: str) -> None:
        """Write text with its middle at a column."""
        self.put(row, max(column - len(text) // 2, 0), text)

    def bar(self, row: int, columns: Sequence[int], label: str, corners: str) -> int:
        """Draw a line over columns, with its label in the middle; returns the column of the middle.

        Args:
            row: the row of the line.
            columns: the columns that it joins; for a single one only the label is written.
            label: text in the middle; may be empty.
            corners: three characters: for the first column, for those between, and for the last one.
        """
        first, last = columns[0], columns[-1]
        middle = (first + last) // 2
        if first != last:
            self.put(row, first, corners[0] + "─" * (last - first - 1) + corners[2])
            for column in columns[1:-1]:
                self.put(row, column, corners[1])
        text = f" {label} " if label and last - first > len(label) + 4 else label
        self.put(row, max((first + last + 1 - len(text)) // 2, 0), text)
        return middle

    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self.rows]


def draw(cluster: Cluster, topology: Topology, width: int) -> list[str]:
    """The lines of a drawing; the links of a node wider than ``width`` characters are listed instead."""
    types = [device.type for device in cluster.devices]
    lines: list[str] = []
    for group in topology.groups(types):
        node = topology.nodes[group[0]]
        if len(topology.nodes) > 1:
            each = f" … {topology.names[group[-1]]}, {len(group)} alike" if len(group) > 1 else ""
            lines += [f"{topology.names[group[0]]}{each}: {_contents(cluster, node)}", ""]
        drawn = draw_node(node) if node.drawn else []
        if not drawn or max(map(len, drawn)) > width:
            drawn = list_links(cluster, node)
        lines += [*(f"  {line}".rstrip() for line in drawn), ""]
    if topology.rails:
        lines += ["network", "", *(f"  {line}" for line in draw_network(topology, width - 2)), ""]
    return lines


def _contents(cluster: Cluster, node: NodeView) -> str:
    """A node's devices by type: ``4 × H100-SXM``."""
    types = [cluster.devices[number].type or "device" for number in node.numbers]
    return " + ".join(f"{types.count(kind)} × {kind}" for kind in dict.fromkeys(types))


def draw_node(node: NodeView) -> list[str]:
    """One node, a column for each device."""
    canvas, row = Canvas(), 0
    labels = [branch.pcie or "" for branch in node.branches if len(branch.devices) == 1]
    labels += [f"  ├{nic}" for branch in node.branches for nic in branch.nics]
    step = max(len(text) for text in (*node.devices, *labels)) + 2
    centres = [step // 2 + step * place for place in range(len(node.devices))]
    for label, places in node.switches:
        canvas.bar(row, [centres[place] for place in places] or [centres[0]], label, "┌┬┐")
        row += 1
    for a, b in node.bridges:
        canvas.bar(row, [centres[a], centres[b]], "", "╭─╮")
    row += bool(node.bridges)
    for centre, device in zip(centres, node.devices, strict=True):
        canvas.centred(row, centre, device)
    middles = [_branch(canvas, row + 1, branch, centres) for branch in node.branches]
    row += 2
    deepest = max((len(branch.nics) for branch in node.branches), default=0)
    for branch, middle in zip(node.branches, middles, strict=True):
        for below in range(deepest):
            nic = branch.nics[below] if below < len(branch.nics) else ""
            if branch.host is not None or nic:
                canvas.put(row + below, middle, f"├{nic}" if nic else "│")
    _hosts(canvas, row + deepest, node, middles)
    return canvas.lines()


def _branch(canvas: Canvas, row: int, branch: Branch, centres: Sequence[int]) -> int:
    """Draw a PCIe switch under its devices; returns the column of its middle."""
    columns = [centres[place] for place in branch.devices]
    return canvas.bar(row, columns, branch.pcie or "│", "└┴┘")


def _hosts(canvas: Canvas, row: int, node: NodeView, middles: Sequence[int]) -> None:
    """Draw the hosts, and the links between them."""
    columns = {}
    for host in node.hosts:
        below = [middle for middle, branch in zip(middles, node.branches, strict=True) if branch.host == host]
        if below:
            columns[host] = canvas.bar(row, below, host, "└┴┘")
    if len(columns) > 1 and node.host_links:
        canvas.bar(row + 1, list(columns.values()), "", "└┴┘")


def list_links(cluster: Cluster, node: NodeView) -> list[str]:
    """The links of a node that has no drawing."""
    names = {cluster.devices[number].name for number in node.numbers}
    inside = [link for link in cluster.links if {link.a, link.b} & names]
    between = [link for link in inside if {link.a, link.b} <= names]
    if len(between) == len(inside) == len(names) * (len(names) - 1) // 2 and len(between) > 1:
        return [f"{len(names)} devices, a separate link between every two"]
    wide = max((len(f"{link.a} ── {link.b}") for link in inside), default=0)
    lines = [
        f"{f'{link.a} ── {link.b}':<{wide}}  {rate_text(link.bytes_per_s)}  {seconds_text(link.latency_s)}"
        for link in inside[:MOST_LINKS]
    ]
    rest = len(inside) - MOST_LINKS
    return [*(lines or ["no links"]), *([f"… and {rest} more"] if rest > 0 else [])]


def draw_network(topology: Topology, width: int) -> list[str]:
    """A line for each switch with NICs, a column for each node."""
    rails = [rail for rail in topology.rails if any(rail.nics)]
    left = max(len(rail.switch) for rail in rails)
    ups = dict.fromkeys(up for rail in rails for up in rail.up)
    right = 6 + len(" ".join(ups))
    step = 2 + max(len(text) for text in (*topology.names, *(",".join(nics) for rail in rails for nics in rail.nics)))
    shown = _shown(len(topology.names), (width - left - 3 - right) // step)
    heads = ["…" if node is None else topology.names[node] for node in shown]
    lines = [" " * (left + 3) + "".join(f"{head:<{step}}" for head in heads).rstrip()]
    for number, rail in enumerate(rails):
        cells = ["…" if node is None else ",".join(rail.nics[node]) for node in shown]
        row = "".join(f"{cell:─<{step}}" for cell in cells)
        up = _upward(number, rails)
        lines.append(f"{rail.switch:>{left}} ──{row}{up}" if up else f"{rail.switch:>{left}} ──{row}".rstrip("─ "))
    return lines


def _upward(number: int, rails: Sequence[Rail]) -> str:
    """The end of a rail's line: a brace to the switches that all rails have in common, or the names of its own."""
    up = rails[number].up
    if not up or len(rails) == 1 or any(rail.up != up for rail in rails):
        return f"── {' '.join(up)}" if up else ""
    brace = "┐" if number == 0 else "┘" if number == len(rails) - 1 else "┤"
    if number != (len(rails) - 1) // 2:
        return f"─{brace}"
    return f"─{'┬' if number == 0 else '┼'}── {' '.join(up)}"


def _shown(count: int, fitting: int) -> list[int | None]:
    """The columns that are shown if ``fitting`` fit: all, or the first ones and the last, with None for the others."""
    if count <= max(fitting, 3):
        return list(range(count))
    return [*range(max(fitting, 3) - 2), None, count - 1]


def rate_text(bytes_per_s: float) -> str:
    """A rate of a link in each direction: ``23.5 GB/s``."""
    return f"{bytes_per_s / 1e9:.4g} GB/s"
