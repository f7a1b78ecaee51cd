"""The operator graph: the operators of a training step in their order, with the costs of each.

A document of format ``panpipe.opgraph/1`` holds one; capture derives one from a model. A node is one operator, an edge
a tensor that one operator produces and another reads. Nodes are in topological order, and every partition cuts that
order into consecutive stages.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from attrs import evolve, field, frozen

from ..cluster.rank_kinds import CONTEXT_RANKS, TENSOR_RANKS
from ..documents import omit_at_default, read_document, to_json
from ..errors import RequestError
from ..files.limits import check_seconds
from .reductions import Overlap, Rings, TensorReductions, sum_of

FORMAT = "panpipe.opgraph/1"


@frozen(slots=False)
class OpNode:
    """One operator. Times in seconds for one microbatch, memory in bytes.

    Args:
        name: module path, operator and ordinal; unique in the graph.
        forward_s, backward_input_s, backward_weight_s: time of F, I and W.
        optimizer_s: time of the optimizer step over this operator's parameters, once a step.
        parameter_bytes: of its parameters alone.
        state_bytes: of parameters, gradients and optimizer state together, at the parameters' first reader.
        saved_bytes: held from forward to backward, for each microbatch in flight.
        shared_bytes: held for all microbatches together: values that it computes from parameters alone.
        workspace_bytes: needed only while it runs.
        parameters: names of the parameters it reads; empty if a file does not list them.
        reductions: its all-reduces over tensor ranks, whose time is part of its times; None if it has none.
        largest_gradient_bytes: of its parameters' gradients the largest, for a node of several operators; 0 for all of
            them together.
        trained_bytes: of those of its parameters that get a gradient; None for all of them.
        frozen: names of those that get none, where the graph has them.
        copies: number of context and expert ranks with the same parameters, which share what replicas share.
    """

    name: str
    forward_s: float = 0.0
    backward_input_s: float = 0.0
    backward_weight_s: float = 0.0
    optimizer_s: float = 0.0
    parameter_bytes: int = 0
    state_bytes: int = 0
    saved_bytes: int = 0
    workspace_bytes: int = 0
    parameters: tuple[str, ...] = ()
    reductions: TensorReductions | None = None
    shared_bytes: int = 0
    largest_gradient_bytes: int = 0
    trained_bytes: int | None = None
    frozen: tuple[str, ...] = ()
    copies: int = 1

    @property
    def held_parameter_bytes(self) -> int:
        """The part of ``state_bytes`` that is parameters: none for a parameter that an earlier operator reads."""
        return min(self.parameter_bytes, self.state_bytes)

    @property
    def gradient_bytes(self) -> int:
        """The part of ``state_bytes`` that is gradients, which are as large as their parameters."""
        trained = self.parameter_bytes if self.trained_bytes is None else self.trained_bytes
        return min(trained, self.state_bytes - self.held_parameter_bytes)

    @property
    def optimizer_bytes(self) -> int:
        """The part of ``state_bytes`` that is optimizer state."""
        return self.state_bytes - self.held_parameter_bytes - self.gradient_bytes

    @property
    def undivided_bytes(self) -> int:
        """Bytes of the largest gradient, at most."""
        return self.largest_gradient_bytes or self.gradient_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes held for any number of microbatches in flight: state and shared tensors."""
        return self.state_bytes + self.shared_bytes


def fewest_copies(nodes: Iterable[OpNode]) -> int:
    """The ``copies`` of several operators together."""
    return min((node.copies for node in nodes if node.parameter_bytes), default=1)


omit_at_default(TensorReductions, "over", "more")
omit_at_default(
    OpNode, "reductions", "shared_bytes", "largest_gradient_bytes", "trained_bytes", "frozen", "copies"
)  # fmt: skip


@frozen(slots=False)
class OpEdge:
    """A tensor that one operator produces and another reads.

    Args:
        src, dst: names of the producing and the reading node.
        bytes: its size for one microbatch.
        gradient: whether a gradient of the same size is sent back.
        tensor: index of the producer's output; readers of the same output share one transfer.
    """

    src: str
    dst: str
    bytes: int
    gradient: bool = True
    tensor: int = 0


@frozen(slots=False)
class OpGraph:
    """Operators in topological order, and the tensors between them.

    Raises:
        RequestError: two nodes have one name, an edge names no node or is against the order, or a cost is negative,
            or the times together are above a year.
    """

    nodes: tuple[OpNode, ...]
    edges: tuple[OpEdge, ...] = ()
    name: str = field(default="", kw_only=True)

    def __attrs_post_init__(self) -> None:
        if len(self.index) != len(self.nodes):
            counts = Counter(node.name for node in self.nodes)
            twice = next(name for name, count in counts.items() if count > 1)
            raise RequestError(f"operator '{twice}' appears twice in the graph: names are unique; rename one")
        for node in self.nodes:
            _check_costs(node)
        # So every stage's times are within the limit, too, and its plan can be read.
        together = sum(getattr(node, name) for node in self.nodes for name in _TIMES)
        check_seconds("the time of all operators together", together)
        for edge in self.edges:
            for end in (edge.src, edge.dst):
                if end not in self.index:
                    raise RequestError(f"edge {edge.src} → {edge.dst} names '{end}', which is not a node: add the node")
            if self.index[edge.src] >= self.index[edge.dst]:
                raise RequestError(
                    f"edge {edge.src} → {edge.dst} runs against the order of the nodes: "
                    "nodes must be in topological order; move one"
                )
            if edge.bytes < 0:
                raise RequestError(f"edge {edge.src} → {edge.dst} has {edge.bytes} bytes: a size must be at least 0")

    @cached_property
    def index(self) -> dict[str, int]:
        """Position of each node in the order."""
        return {node.name: i for i, node in enumerate(self.nodes)}

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that operators read, each once, in the order of their first readers."""
        return tuple(dict.fromkeys(name for node in self.nodes for name in node.parameters))

    @cached_property
    def frozen(self) -> frozenset[str]:
        """Names of the parameters that get no gradient, as far as the graph has them."""
        return frozenset(name for node in self.nodes for name in node.frozen)

    @cached_property
    def hash(self) -> str:
        """Identity of the graph: its operators, parameters and tensors, without times, which differ by machine."""
        identity = {
            "nodes": [[node.name, node.parameter_bytes, list(node.parameters)] for node in self.nodes],
            "edges": [[e.src, e.dst, e.bytes, e.gradient, e.tensor] for e in self.edges],
        }
        return hashlib.sha256(json.dumps(identity, separators=(",", ":")).encode()).hexdigest()


_TIMES = ("forward_s", "backward_input_s", "backward_weight_s", "optimizer_s")
_SIZES = (
    "parameter_bytes", "state_bytes", "saved_bytes", "workspace_bytes", "shared_bytes", "largest_gradient_bytes",
    "trained_bytes",
)  # fmt: skip


def _check_costs(node: OpNode) -> None:
    for name in _TIMES:
        check_seconds(f"{name} of '{node.name}'", getattr(node, name))
    for name in _SIZES:
        value = getattr(node, name)
        if value is not None and value < 0:
            raise RequestError(f"{name} of '{node.name}' is {value}: a size must be at least 0")
    if node.trained_bytes is not None and node.trained_bytes > node.parameter_bytes:
        raise RequestError(
            f"trained_bytes of '{node.name}' is {node.trained_bytes}, above its parameter_bytes "
            f"{node.parameter_bytes}: it is a part of them"
        )


def read_graph(path: str | Path) -> OpGraph:
    """Read an operator-graph file. Raises RequestError if it is not one."""
    graph = read_document(path, FORMAT, OpGraph)
    if not graph.nodes:
        raise RequestError(f"{path} has no nodes: an operator graph needs at least one")
    split = next((node.name for node in graph.nodes if node.reductions is not None), None)
    if split is not None:
        raise RequestError(
            f"{path}: operator '{split}' has all-reduces over tensor ranks: only --model can be planned with them; "
            "remove 'reductions'"
        )
    _check_states(path, graph)
    return graph


def _check_states(path: str | Path, graph: OpGraph) -> None:
    """Check that a node's state includes its parameters, except those of an earlier node, which has their state."""
    seen: set[str] = set()
    for node in graph.nodes:
        if node.state_bytes < node.parameter_bytes and not seen.intersection(node.parameters):
            raise RequestError(
                f"{path}: state_bytes of '{node.name}' is {node.state_bytes}, below its parameter_bytes "
                f"{node.parameter_bytes}: state_bytes is of parameters, gradients and optimizer state together"
            )
        seen.update(node.parameters)


def with_reduction_times(graph: OpGraph, rings: Rings, overlap: Overlap | None = None) -> OpGraph:
    """A graph of one rank with the time of its exchanges with others, which are part of F and I.

    Messages of context ranks overlap the computation of the node that has them, but for its first block.

    Args:
        graph: the graph with times of computation only.
        overlap: what of all-reduces over tensor ranks is exposed; None for all.
    """
    shares = overlap or Overlap()

    def share(node: OpNode, whole: TensorReductions) -> tuple[float, float]:
        if whole.over == TENSOR_RANKS:
            return shares.forward, shares.backward
        if whole.over != CONTEXT_RANKS:
            return 1.0, 1.0
        rest = 1 - 1 / whole.ranks
        computed = node.forward_s * rest, (node.backward_input_s + node.backward_weight_s) * rest
        forward, backward = (
            max(0.0, 1 - own / max(seconds, 1e-30))
            for own, seconds in zip(computed, (whole.forward_s, whole.backward_s), strict=True)
        )
        return forward, backward

    def timed(node: OpNode) -> OpNode:
        if node.reductions is None:
            return node
        owns, forward_s, backward_s = [], node.forward_s, node.backward_input_s
        for each in node.reductions.each:
            ring = rings[each.over]
            whole = each.timed(ring.ranks, ring.latency_s, ring.s_per_byte)
            own = each.exposed(*share(node, whole)).timed(ring.ranks, ring.latency_s, ring.s_per_byte)
            owns.append(own)
            forward_s += own.forward_s + shares.slowed * (whole.forward_s - own.forward_s)
            backward_s += own.backward_s + shares.slowed * (whole.backward_s - own.backward_s)
        return evolve(node, forward_s=forward_s, backward_input_s=backward_s, reductions=sum_of(owns))

    return evolve(graph, nodes=tuple(map(timed, graph.nodes)))


def graph_json(graph: OpGraph) -> str:
    """The operator-graph document of a graph."""
    return to_json(FORMAT, graph)


def stage_of_nodes(graph: OpGraph, stages: Sequence[Sequence[str]]) -> dict[str, int]:
    """Stage index of every node.

    Raises:
        RequestError: a node is in no stage or in two, or a stage names a node that the graph does not have.
    """
    where: dict[str, int] = {}
    for index, names in enumerate(stages):
        for name in names:
            if name not in graph.index:
                raise RequestError(f"stage {index} names operator '{name}', which this graph does not have: plan again")
            if name in where:
                raise RequestError(f"operator '{name}' is in stages {where[name]} and {index}: put it in one stage")
            where[name] = index
    missing = next((node.name for node in graph.nodes if node.name not in where), None)
    if missing is not None:
        raise RequestError(f"operator '{missing}' is in no stage: every operator needs one; plan again")
    return where
