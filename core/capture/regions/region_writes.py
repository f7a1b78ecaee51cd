"""Refuses in-place writes after a region to a tensor that shared memory with another one inside the region.

A region returns copies: its results share no memory with its inputs or with each other. That makes a difference only if
a captured operator later writes one of them in place, and in one process the write would also change, for instance, the
region's input.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx

from ...tensor_metadata import storage_of
from ..graph.nodes import written_arguments
from ..values.user_lines import line_of
from .regions import Spot, region_of


def note_later_writes(graph: fx.Graph, values: Mapping[str, Any]) -> None:
    """Record at every region which of its inputs and results are written after it, with the line.

    Args:
        graph: a captured graph.
        values: node name → its fake result; all of one run.

    Raises:
        RequestError: a write is known to change fewer tensors than in one process.
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
