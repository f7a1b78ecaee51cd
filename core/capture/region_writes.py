"""What is written in place behind a region: it may not be what the region read or returned under another name.

A region returns copies: what it makes shares no memory with what it was given, or with another result. Nobody sees the
difference until somebody writes. Where a captured graph does, and the region's Python then returns its own input, say,
the write would reach fewer tensors than in one process.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx

from .nodes import line_of, written_arguments
from .regions import region_of


def note_writes_behind(graph: fx.Graph, values: Mapping[str, Any]) -> None:
    """Tell every region which of its results, and of what it reads, is written behind it, and where.

    Args:
        graph: a captured graph.
        values: node name → its fake result; all of one run.

    Raises:
        RequestError: a write is known to reach less than it does in one process.
    """
    written: dict[int, str] = {}
    for node in reversed(graph.nodes):
        region = region_of(node)
        if region is not None:
            results = [("result", i, tensor) for i, tensor in enumerate(values[node.name][: len(region.made)])]
            reads = [("read", i, values[source.name]) for i, source in enumerate(node.args[0])]
            spots = {(kind, i): tensor.untyped_storage()._cdata for kind, i, tensor in (*results, *reads)}
            region.written = {spot: written[key] for spot, key in spots.items() if key in written}
            region.refuse_writes(region.shared)
        for argument in written_arguments(node):
            if isinstance(value := values[argument.name], Tensor):
                written[value.untyped_storage()._cdata] = line_of(node)
