"""The inputs of planning: operators with costs on each type of device, and the size of a step's batch."""

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from ...core.analytic.kinds import ZIGZAG
from ...core.analytic.optimizers import DEFAULT, find_optimizer
from ...core.cluster.catalog.find import CPU, required_type
from ...core.cluster.cluster import Cluster
from ...core.cluster.device_type import NUMBER_TYPES, DeviceType
from ...core.cluster.rank_kinds import CONTEXT_RANKS, EXPERT_RANKS, TENSOR_RANKS
from ...core.cluster.tensor_groups import GroupedCluster
from ...core.costs.graph import OpGraph, OpNode, read_graph, with_reduction_times
from ...core.costs.layers import recomputing_layers
from ...core.costs.reductions import Overlap, Ring
from ...core.errors import RequestError
from ...core.trace.throughput import StepTotals
from ..bundled_models import bundled_model, is_bundled
from ..output import note

if TYPE_CHECKING:
    from ...core.search.problem.blocks import Blocks


@frozen
class ModelRequest:
    """The model options of the command line.

    Args:
        name: ``module:factory``, or a bundled model's name.
        batch, sequence: samples and tokens of a bundled model's batch, or None.
        dtype: number type of training; the model's own if None.
        optimizer: it determines the state's size; the default if None.
        tensor: number of tensor ranks that share each stage.
        by_tokens: whether they share the tokens between layers, too.
        kernels: how kernels are written, see ``core/analytic/fusion``.
        tp_overlap: which collectives of tensor ranks overlap computation: none, backward or all.
        attends_again: whether the backward computes the core of attention again.
        every: each layer after as many recomputes; None for none.
        context, experts: numbers of context ranks and of expert ranks that share each stage.
        order: which tokens a context rank has, see ``core/analytic/context``.
        shares: whether ranks with the same parameters share the optimizer's state.
    """

    name: str
    batch: int | None = None
    sequence: int | None = None
    dtype: str | None = None
    optimizer: str | None = None
    tensor: int = 1
    by_tokens: bool = False
    kernels: str = "eager"
    tp_overlap: str = "none"
    attends_again: bool = False
    every: int | None = None
    context: int = 1
    experts: int = 1
    order: str = ZIGZAG
    shares: bool = False


@frozen
class PlanningCosts:
    """Operators with costs.

    Args:
        graph: with times on the cluster's slowest type of device, or on this host.
        by_type: with times on each type of device; empty if they are equal on all devices.
        parameter_sizes: bytes of every parameter; None if the graph does not have them.
        work: samples, tokens and FLOPs of a step.
        peak_flops_per_s: of every device for the number type of most of the model's FLOPs; None if unknown.
        step_error: relative error of the step that 9 of 10 predictions from these costs stay below, see
            ``core/validation/interval``; None if unknown.
    """

    graph: OpGraph
    by_type: Mapping[str, OpGraph]
    parameter_sizes: Mapping[str, int] | None
    work: StepTotals
    peak_flops_per_s: Sequence[float] | None = None
    step_error: float | None = None

    @property
    def graphs(self) -> tuple[OpGraph, ...]:
        """The operators with their costs on each type of device."""
        return tuple(self.by_type.values()) or (self.graph,)

    def joined(self, blocks: "Blocks") -> "PlanningCosts":
        """The same costs, summed over blocks of operators that are not cut."""
        by_type = {name: blocks.joined(graph) for name, graph in self.by_type.items()}
        sizes = self.parameter_sizes if self.parameter_sizes is not None else blocks.sizes or None
        return evolve(self, graph=blocks.joined(self.graph), by_type=by_type, parameter_sizes=sizes)


def graph_costs(path: Path, work: StepTotals) -> PlanningCosts:
    """Costs of an operator-graph file."""
    return PlanningCosts(read_graph(path), {}, None, work)


def model_costs(
    request: ModelRequest, cluster: Cluster, name: str, microbatches: int, work: StepTotals
) -> PlanningCosts:
    """Costs of a model on a cluster: from the description of its devices, or measured if it is this host.

    Args:
        request: the model.
        cluster: the cluster to plan for.
        name: the cluster's name on the command line.
        microbatches: the number of microbatches that the batch is split into.
        work: samples and tokens of a step as given by the user; they have precedence over those of the model.

    Raises:
        RequestError: an unknown number type or optimizer, a device without a type, or a model that cannot be captured.
    """
    if request.dtype is not None and request.dtype not in NUMBER_TYPES:
        raise RequestError(f"there is no number type '{request.dtype}': use one of {', '.join(NUMBER_TYPES)}")
    find_optimizer(request.optimizer or DEFAULT)
    if CPU.fullmatch(name):
        return _measured(request, microbatches, work)
    types = [required_type(cluster, i) for i in range(len(cluster.devices))]
    found = _analytic(request, types, microbatches, work)

    def of_group(graph: OpGraph) -> OpGraph:
        if isinstance(cluster, GroupedCluster):
            counts = {TENSOR_RANKS: cluster.tensor, CONTEXT_RANKS: cluster.context, EXPERT_RANKS: cluster.experts}
            rings = {kind: Ring(count, *cluster.slowest(kind)) for kind, count in counts.items() if count > 1}
            graph = with_reduction_times(graph, rings, _overlap(request, types[0]))
            graph = _with_common_parameters(graph, cluster, shares=request.shares)
        return graph if request.every is None else recomputing_layers(graph, request.every)

    return evolve(
        found, graph=of_group(found.graph), by_type={name: of_group(graph) for name, graph in found.by_type.items()}
    )


def _with_common_parameters(graph: OpGraph, cluster: GroupedCluster, *, shares: bool) -> OpGraph:
    """The graph with the sums of gradients over the context and expert ranks that have the same parameters.

    They follow the sums over replicas, and are exposed. Experts are on one of the expert ranks.

    Args:
        graph: of one rank.
        cluster: of the groups.
        shares: whether these ranks share the optimizer's state.
    """
    kinds = [kind for kind, count in ((CONTEXT_RANKS, cluster.context), (EXPERT_RANKS, cluster.experts)) if count > 1]
    whole = {False: tuple(kinds), True: tuple(kind for kind in kinds if kind != EXPERT_RANKS)}
    rates = {own: cluster.slowest_sum(over)[1] if over else 0.0 for own, over in whole.items()}
    ranks = {False: cluster.context * cluster.experts, True: cluster.context}

    def changed(node: OpNode) -> OpNode:
        own = any(".experts." in name for name in node.parameters)
        parts = ranks[own] if shares else 1
        return evolve(
            node,
            optimizer_s=node.optimizer_s / parts + node.gradient_bytes * rates[own],
            state_bytes=node.state_bytes - node.optimizer_bytes + ceil(node.optimizer_bytes / parts),
        )

    return evolve(graph, nodes=tuple(map(changed, graph.nodes))) if kinds else graph


def _overlap(request: ModelRequest, device: DeviceType) -> Overlap:
    """What tensor ranks wait for, by ``--tp-overlap``.

    ``backward``: Megatron-LM sums gradients of a column layer's input while it computes those of its weights (async
    communication, arXiv 2205.05198, section 4.2.2); with sequence parallelism, of three collectives of a layer in the
    backward, the gather before a row layer's gradients is exposed. ``all``: Transformer Engine's user buffers divide
    collectives and products into as many parts as there are ranks, of which the first is exposed.
    """
    slowed = (device.communication_multiprocessors or 0) / (device.multiprocessors or 1)
    if request.tp_overlap == "backward":
        return Overlap(1.0, 1 / 3 if request.by_tokens else 0.0, slowed)
    if request.tp_overlap == "all":
        return Overlap(1 / request.tensor, 1 / request.tensor, slowed)
    return Overlap()


def _measured(request: ModelRequest, microbatches: int, work: StepTotals) -> PlanningCosts:
    from ..models import planned_model

    planned = planned_model(
        request.name, microbatches, batch=request.batch, sequence=request.sequence, dtype=request.dtype
    )
    note("timing the model's operators on this host")
    optimizer = find_optimizer(request.optimizer) if request.optimizer else None
    graph = planned.measured(optimizer)
    return PlanningCosts(graph, {}, planned.sizes, _known(work, planned.work()))


def _analytic(
    request: ModelRequest, devices: Sequence[DeviceType], microbatches: int, work: StepTotals
) -> PlanningCosts:
    from ...core.analytic.context import over_context
    from ...core.analytic.model import ModelWork, costs_by_type, model_work
    from ...core.analytic.roofline import rate_of
    from ..models import PlannedModel, planned_model

    context, experts = request.context, request.experts
    batch, sequence = request.batch, request.sequence
    if context > 1 or experts > 1:
        batch, sequence = _of_rank(request, microbatches)

    def work_with(repeat: bool) -> tuple[PlannedModel, ModelWork | None]:
        planned = planned_model(
            request.name, microbatches, batch=batch, sequence=sequence, dtype=request.dtype, empty=True,
            tensor=request.tensor, by_tokens=request.by_tokens, experts=experts, repeat=repeat,
        )  # fmt: skip
        own = model_work(
            planned.operators, request.kernels, gathers_again=request.by_tokens, attends_again=request.attends_again
        )
        if context > 1:
            own = over_context(own, context, request.order)
        return planned, own if planned.repeated is None else planned.repeated.expanded(own)

    planned, found = work_with(repeat=True)
    if found is None:  # the layers are equal, and what they do is not
        planned, found = work_with(repeat=False)
    assert found is not None
    products, optimizer = request.dtype or "", find_optimizer(request.optimizer or DEFAULT)
    graphs = costs_by_type(found, dict.fromkeys(devices), optimizer=optimizer, products=products)
    peaks = [rate_of(device, found.number_type, products) for device in devices]
    slowest = max(graphs, key=lambda name: sum(node.forward_s for node in graphs[name].nodes))
    if len(graphs) > 1:
        note(f"each stage has the costs of its own device's type: {', '.join(graphs)}")
    return PlanningCosts(
        graphs[slowest], graphs if len(graphs) > 1 else {}, planned.sizes,
        _known(work, _of_all_ranks(planned.work(found.flops), context, experts)), peaks, _step_error(devices),
    )  # fmt: skip


def _of_rank(request: ModelRequest, microbatches: int) -> tuple[int | None, int]:
    """Samples of a step, and tokens of each, that one of the context and expert ranks has of a bundled model."""
    context, experts, batch = request.context, request.experts, request.batch
    if not is_bundled(request.name):
        raise RequestError(
            f"--cp and --ep are for bundled models and files of a config.json, and '{request.name}' is a function: "
            "leave them out"
        )
    sequence = request.sequence or bundled_model(request.name).sequence
    parts = 2 * context if request.order == ZIGZAG and context > 1 else context
    if sequence is None or sequence % parts:
        raise RequestError(
            f"{context} context ranks cannot share {sequence} tokens of a sample: give --sequence a multiple of {parts}"
        )
    if batch is not None and batch % (microbatches * experts):
        raise RequestError(
            f"{experts} expert ranks cannot share {batch} samples in {microbatches} microbatches: give --batch a "
            f"multiple of {microbatches * experts}"
        )
    return None if batch is None else batch // experts, sequence // context


def _of_all_ranks(work: StepTotals, context: int, experts: int) -> StepTotals:
    """Samples and tokens of all context and expert ranks; FLOPs are those of one rank, as are the devices' rates."""
    samples, tokens = work.samples, work.tokens
    return evolve(
        work,
        samples=None if samples is None else samples * experts,
        tokens=None if tokens is None else tokens * experts * context,
    )


def _step_error(devices: Sequence[DeviceType]) -> float | None:
    """The largest error of the devices of which no run was compared, else 0; None if that of one is unknown."""
    if any(device.step_error is None for device in devices):
        return None
    return max((device.step_error or 0.0 for device in devices if device.sources["step_error"].assumed), default=0.0)


def _known(given: StepTotals, found: StepTotals) -> StepTotals:
    """The user's numbers, and those found where the user gave none."""
    return StepTotals(
        given.samples if given.samples is not None else found.samples,
        given.tokens if given.tokens is not None else found.tokens,
        found.flops,
    )
