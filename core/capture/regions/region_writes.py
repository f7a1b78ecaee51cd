"""What is written in place behind a region: it may not be what the region read or returned under another name.

A region returns copies: what it makes shares no memory with what it was given, or with another result. Nobody sees the
difference until somebody writes. Where a captured graph does, and the region's Python then returns its own input, say,
the write would reach fewer tensors than in one process.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx

from ..graph.nodes import written_arguments
from ..graph.storages import storage_of
from ..values.user_lines import line_of
from .regions import Spot, region_of


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
            results, reads = values[node.name][: len(region.made)], [values[source.name] for source in node.args[0]]
            spots: dict[Spot, int | None] = {("result", i): storage_of(tensor) for i, tensor in enumerate(results)}
            spots |= {("read", i): storage_of(tensor) for i, tensor in enumerate(reads)}
            region.written = {spot: written[key] for spot, key in spots.items() if key in written}
            region.refuse_writes(region.shared)
        for argument in written_arguments(node):
            key = storage_of(value) if isinstance(value := values[argument.name], Tensor) else None
            if key is not None:
                written[key] = line_of(node)
