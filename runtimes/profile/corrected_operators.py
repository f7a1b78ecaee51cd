"""Corrects the measured times of operators so that their sums are those of whole stages."""

from collections.abc import Sequence

from attrs import evolve

from ...core.costs.costs import StageCosts
from ...core.costs.graph import OpGraph


def corrected_graph(graph: OpGraph, stages: Sequence[Sequence[str]], costs: Sequence[StageCosts]) -> OpGraph:
    """The graph with the times of operators scaled so that their sum in each stage is the time of its programs.

    An operator that is timed alone has overhead that a program lacks, and lacks the memory traffic of a program.

    Args:
        graph: with measured times.
        stages: names of the operators of each stage.
        costs: measured costs of each stage.
    """
    scale = {}
    for names, cost in zip(stages, costs, strict=True):
        nodes = [graph.nodes[graph.index[name]] for name in names]
        forward = sum(node.forward_s for node in nodes)
        backward = sum(node.backward_input_s + node.backward_weight_s for node in nodes)
        factors = cost.forward_s / (forward or 1.0), cost.full_backward_s / (backward or 1.0)
        scale.update(dict.fromkeys(names, factors))
    return evolve(
        graph,
        nodes=tuple(
            evolve(
                node,
                forward_s=node.forward_s * scale[node.name][0],
                backward_input_s=node.backward_input_s * scale[node.name][1],
                backward_weight_s=node.backward_weight_s * scale[node.name][1],
            )
            for node in graph.nodes
        ),
    )
