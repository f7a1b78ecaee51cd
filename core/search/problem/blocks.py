"""Blocks: operators that stay in one stage. The search cuts a graph whose nodes are blocks; its plans are expanded.

operators  ── joined ──▶ graph of blocks ── search ──▶ plan of blocks ── expanded ──▶ plan of operators
"""

from collections.abc import Mapping, Sequence
from functools import cached_property

from attrs import evolve, frozen

from ...costs.graph import OpEdge, OpGraph, OpNode, fewest_copies
from ...costs.layers import layer_blocks
from ...costs.reductions import sum_of
from ...errors import RequestError
from ...plan.plan import Plan
from .assemble import parameter_bytes

BOUNDARIES = ("operators", "layers")
"""Where stages may end."""

Stages = tuple[tuple[str, ...], ...]


def check_boundaries(given: object) -> None:
    """Refuse a value of ``boundaries`` that is not known. Raises RequestError."""
    if given not in BOUNDARIES:
        raise RequestError(f"boundaries is {given!r}: give one of {', '.join(map(repr, BOUNDARIES))}")


@frozen(slots=False)
class Blocks:
    """Consecutive operators that stay together; a block has the name of its first operator.

    Args:
        operators: names of each block's operators, in the graph's order.
        graph_hash: of the graph of operators.
        sizes: bytes of parameters that operators of several blocks read.
    """

    operators: Stages
    graph_hash: str
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, graph: OpGraph, boundaries: str, sizes: Mapping[str, int] | None = None) -> "Blocks":
        """The blocks that stages may consist of.

        Args:
            boundaries: ``"operators"`` or ``"layers"``.
            sizes: bytes of each parameter, if known.

        Raises:
            RequestError: no layers are known.
        """
        names = [node.name for node in graph.nodes]
        if boundaries == "operators":
            return cls(tuple((name,) for name in names), graph.hash, sizes or {})
        return cls(layer_blocks(names), graph.hash, _sizes(graph) if sizes is None else sizes)

    @cached_property
    def _whole(self) -> bool:
        return all(len(names) == 1 for names in self.operators)

    @cached_property
    def _by_first(self) -> dict[str, tuple[str, ...]]:
        return {names[0]: names for names in self.operators}

    def joined(self, graph: OpGraph) -> OpGraph:
        """The graph of blocks: each has the costs of its operators as one stage."""
        if self._whole:
            return graph
        block = {name: names[0] for names in self.operators for name in names}
        nodes = tuple(_joined([graph.nodes[graph.index[name]] for name in names]) for names in self.operators)
        numbers: dict[str, dict[tuple[str, int], int]] = {}
        edges: dict[tuple[str, str, int], OpEdge] = {}
        for edge in graph.edges:
            src, dst = block[edge.src], block[edge.dst]
            if src == dst:
                continue
            known = numbers.setdefault(src, {})
            tensor = known.setdefault((edge.src, edge.tensor), len(known))
            other = edges.get((src, dst, tensor))
            size = edge.bytes if other is None else max(edge.bytes, other.bytes)
            gradient = edge.gradient or (other is not None and other.gradient)
            edges[src, dst, tensor] = OpEdge(src, dst, size, gradient, tensor)
        return OpGraph(nodes, tuple(edges.values()), name=graph.name)

    def expanded_stages(self, stages: Sequence[Sequence[str]]) -> Stages:
        """Stages of blocks as stages of operators."""
        return tuple(tuple(name for first in names for name in self._by_first[first]) for names in stages)

    def expanded(self, plan: Plan) -> Plan:
        """A plan of blocks as a plan of operators."""
        if self._whole:
            return plan
        nodes = self.expanded_stages([stage.nodes for stage in plan.stages])
        stages = tuple(evolve(stage, nodes=own) for stage, own in zip(plan.stages, nodes, strict=True))
        return evolve(plan, stages=stages, graph_hash=self.graph_hash)

    def refuse_too_few(self, devices: int) -> None:
        """Refuse more devices than blocks of several operators. Raises RequestError."""
        if not self._whole and devices > len(self.operators):
            raise RequestError(
                f"there are {devices} devices for {len(self.operators)} layers and parts around them: a stage needs "
                f"one; use at most {len(self.operators)} devices, or leave boundaries='layers' (--layers) out"
            )


def _joined(nodes: Sequence[OpNode]) -> OpNode:
    return OpNode(
        nodes[0].name,
        forward_s=sum(node.forward_s for node in nodes),
        backward_input_s=sum(node.backward_input_s for node in nodes),
        backward_weight_s=sum(node.backward_weight_s for node in nodes),
        optimizer_s=sum(node.optimizer_s for node in nodes),
        parameter_bytes=sum(node.held_parameter_bytes for node in nodes),
        trained_bytes=sum(node.gradient_bytes for node in nodes),
        state_bytes=sum(node.state_bytes for node in nodes),
        largest_gradient_bytes=max(node.undivided_bytes for node in nodes),
        saved_bytes=sum(node.saved_bytes for node in nodes),
        shared_bytes=sum(node.shared_bytes for node in nodes),
        reductions=sum_of(node.reductions for node in nodes),
        workspace_bytes=max(node.workspace_bytes for node in nodes),
        parameters=tuple(dict.fromkeys(name for node in nodes for name in node.parameters)),
        frozen=tuple(dict.fromkeys(name for node in nodes for name in node.frozen)),
        copies=fewest_copies(nodes),
    )


def _sizes(graph: OpGraph) -> dict[str, int]:
    """Bytes of the parameters that several operators read, which the graph of blocks may not have."""
    seen: set[str] = set()
    shared: set[str] = set()
    for node in graph.nodes:
        shared |= seen & set(node.parameters)
        seen |= set(node.parameters)
    return {name: parameter_bytes(graph, name, None) for name in sorted(shared)}
