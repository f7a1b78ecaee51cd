"""Costs of stages: the one type that profiles, the analytic model, the evaluator and the simulator share."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from attrs import frozen

from ..actions import Action, Kind
from ..documents import omit_at_default
from .graph import OpGraph, fewest_copies, stage_of_nodes
from .reductions import TensorReductions, sum_of


@frozen
class StageCosts:
    """Costs of one stage for one microbatch. Times in seconds (any unit, for abstract schedules), memory in bytes.

    Args:
        forward_s, backward_input_s, backward_weight_s: time of F, I and W.
        backward_s: time of the full backward B; None means I + W.
        optimizer_s: time of the stage's optimizer step.
        parameter_bytes, gradient_bytes, optimizer_bytes: memory held during the whole training.
        saved_bytes: memory that F allocates and the backward frees, over distinct storages. If the stage recomputes,
            RECOMPUTE allocates it.
        freed_by_input_bytes, created_by_input_bytes: the part of ``saved_bytes`` that I frees, and the memory that I
            allocates for W; W frees the rest.
        workspace_bytes: additional memory that an action needs only while it runs.
        recompute_s: time of RECOMPUTE; None means that of F. It omits outputs that only other stages read.
        shared_bytes: memory of values computed from parameters alone, such as their casts under autocast: computed once
            a step, and held while the stage's device computes.
        input_bytes: memory that F of a stage that recomputes keeps until RECOMPUTE starts: its inputs from other
            stages, over distinct storages, and the old values of the buffers that it wrote.
        reductions: the all-reduces over the stage's tensor ranks, whose time is part of ``forward_s``,
            ``backward_input_s``, ``backward_s`` and ``recompute_s``; None if it has none.
        largest_gradient_bytes: of the parameters' gradients the largest; 0 if it is unknown. What replicas share is
            summed in buckets of whole gradients.
        gathered_bytes: memory of the parameters that replicas share, and of values computed from parameters alone,
            while the parameters are gathered; 0 for a whole stage.
        copies: see ``OpNode``.
    """

    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    backward_s: float | None = None
    optimizer_s: float = 0.0
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    saved_bytes: float = 0
    freed_by_input_bytes: float = 0
    created_by_input_bytes: float = 0
    workspace_bytes: int = 0
    recompute_s: float | None = None
    input_bytes: float = 0
    reductions: TensorReductions | None = None
    shared_bytes: int = 0
    largest_gradient_bytes: int = 0
    gathered_bytes: int = 0
    copies: int = 1

    @property
    def full_backward_s(self) -> float:
        """Time of B."""
        if self.backward_s is not None:
            return self.backward_s
        return self.backward_input_s + self.backward_weight_s

    @property
    def second_forward_s(self) -> float:
        """Time of RECOMPUTE."""
        return self.forward_s if self.recompute_s is None else self.recompute_s

    @property
    def kept_bytes(self) -> float:
        """Bytes that a microbatch holds between I and W."""
        return self.saved_bytes - self.freed_by_input_bytes + self.created_by_input_bytes

    @property
    def reserved_bytes(self) -> float:
        """Bytes that must be free before F starts: after I a microbatch may hold more than after F."""
        return max(self.saved_bytes, self.kept_bytes)

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters, of values computed from them alone, of gradients and of optimizer state."""
        return self.parameter_bytes + self.shared_bytes + self.gradient_bytes + self.optimizer_bytes


omit_at_default(
    StageCosts, "reductions", "shared_bytes", "largest_gradient_bytes", "gathered_bytes", "copies"
)  # fmt: skip

EMPTY_GRADIENT_BYTES = 1
"""Size of the gradient of an empty tensor: not 0, because the producer's backward still waits for the reader's."""


@frozen
class StageEdge:
    """The tensors that one stage sends another for each microbatch.

    Args:
        src, dst: the producing and the reading stage.
        bytes: of the activations, all tensors together; they are sent as one message.
        gradient_bytes: of the gradients; 0 if no tensor of the edge is differentiable, and then none is sent.
    """

    src: int
    dst: int
    bytes: int
    gradient_bytes: int


def stage_edges(graph: OpGraph, stages: Sequence[Sequence[str]]) -> tuple[StageEdge, ...]:
    """The edges between stages: a tensor goes once, directly, to each later stage that reads it."""
    where = stage_of_nodes(graph, stages)
    sent: dict[tuple[int, int], tuple[dict[tuple[str, int], int], ...]] = {}
    for edge in graph.edges:
        pair = where[edge.src], where[edge.dst]
        if pair[0] != pair[1]:
            sizes, gradients = sent.setdefault(pair, ({}, {}))
            key = edge.src, edge.tensor
            sizes[key] = max(sizes.get(key, 0), edge.bytes)
            if edge.gradient:
                gradients[key] = max(sizes[key], EMPTY_GRADIENT_BYTES)
    return tuple(StageEdge(*pair, *(sum(sizes.values()) for sizes in sent[pair])) for pair in sorted(sent))


def stage_costs(graph: OpGraph, stages: Sequence[Sequence[str]]) -> tuple[StageCosts, ...]:
    """Costs of stages as the sum of their nodes; the workspace is the largest of any node.

    The inputs that a stage keeps for recompute are the tensors on its edges from earlier stages, each once.
    """
    inputs = _input_bytes(graph, stages)
    result = []
    for index, names in enumerate(stages):
        nodes = [graph.nodes[graph.index[name]] for name in names]
        result.append(
            StageCosts(
                forward_s=sum(node.forward_s for node in nodes),
                backward_input_s=sum(node.backward_input_s for node in nodes),
                backward_weight_s=sum(node.backward_weight_s for node in nodes),
                optimizer_s=sum(node.optimizer_s for node in nodes),
                parameter_bytes=sum(node.held_parameter_bytes for node in nodes),
                gradient_bytes=sum(node.gradient_bytes for node in nodes),
                optimizer_bytes=sum(node.optimizer_bytes for node in nodes),
                saved_bytes=sum(node.saved_bytes for node in nodes),
                shared_bytes=sum(node.shared_bytes for node in nodes),
                input_bytes=inputs[index],
                workspace_bytes=max((node.workspace_bytes for node in nodes), default=0),
                reductions=sum_of(node.reductions for node in nodes),
                largest_gradient_bytes=max((node.undivided_bytes for node in nodes), default=0),
                copies=fewest_copies(nodes),
            )
        )
    return tuple(result)


def _input_bytes(graph: OpGraph, stages: Sequence[Sequence[str]]) -> list[int]:
    """Per stage the bytes of the tensors that it reads from other stages."""
    where = stage_of_nodes(graph, stages)
    sizes: list[dict[tuple[str, int], int]] = [{} for _ in stages]
    for edge in graph.edges:
        reader = where[edge.dst]
        if where[edge.src] != reader:
            key = edge.src, edge.tensor
            sizes[reader][key] = max(sizes[reader].get(key, 0), edge.bytes)
    return [sum(tensors.values()) for tensors in sizes]


Seconds = Callable[[StageCosts], float]
"""Duration of an action in seconds, from the costs of its stage."""

COMPUTE_SECONDS: Mapping[Kind, Seconds] = {
    Kind.F: lambda cost: cost.forward_s,
    Kind.B: lambda cost: cost.full_backward_s,
    Kind.I: lambda cost: cost.backward_input_s,
    Kind.W: lambda cost: cost.backward_weight_s,
    Kind.RECOMPUTE: lambda cost: cost.second_forward_s,
    Kind.STEP: lambda cost: cost.optimizer_s,
}
"""The kinds of the compute queue."""

Compute = Sequence[Sequence[Action]]
"""Per device the actions of its compute queue, in order."""


def compute_times(compute: Compute, costs: Iterable[StageCosts]) -> list[list[float]]:
    """Seconds of every item of the compute queues."""
    by_stage = [{kind: seconds(cost) for kind, seconds in COMPUTE_SECONDS.items()} for cost in costs]
    return [[by_stage[action.stage][action.kind] for action in actions] for actions in compute]
