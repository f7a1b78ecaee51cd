"""The storages of saved tensors that may be offloaded."""

from collections.abc import Sequence
from math import floor

from ..costs.costs import StageCosts
from ..costs.graph import OpGraph
from ..plan.memory_policy import Storage

SMALLEST_BYTES = 1_000_000
"""Smaller storages stay on the device: a copy of its own costs more than they free."""


def graph_storages(
    graph: OpGraph, stages: Sequence[Sequence[str]], costs: Sequence[StageCosts]
) -> tuple[tuple[Storage, ...], ...]:
    """Per stage its storages that may be offloaded, in the graph's order: one for each operator that saves enough.

    Args:
        graph: operators with their saved bytes for one microbatch.
        stages: names of the operators of each stage.
        costs: of the stages; if measured, they may save less than their operators do alone.
    """
    result = []
    for names, cost in zip(stages, costs, strict=True):
        nodes = [graph.nodes[graph.index[name]] for name in names]
        total = sum(node.saved_bytes for node in nodes)
        scale = min(cost.saved_bytes / total, 1.0) if total else 1.0
        sizes = ((node.name, floor(scale * node.saved_bytes)) for node in nodes)
        result.append(tuple(Storage(name, size) for name, size in sizes if size >= SMALLEST_BYTES))
    return tuple(result)
