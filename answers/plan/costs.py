"""The inputs of planning: operators with costs on each type of device, and the size of a step's batch."""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from ...core.analytic.kinds import ZIGZAG
from ...core.analytic.optimizers import DEFAULT, find_optimizer
from ...core.cluster.catalog.find import CPU, required_type
from ...core.cluster.cluster import Cluster
from ...core.cluster.device_type import NUMBER_TYPES, DeviceType
from ...core.cluster.rank_kinds import CONTEXT_RANKS, EXPERT_RANKS, TENSOR_RANKS
from ...core.cluster.tensor_groups import GroupedCluster
from ...core.costs.graph import OpGraph, OpNode, with_reduction_times
from ...core.costs.layers import recomputing_layers
from ...core.costs.reductions import Overlap, Ring
from ...core.errors import RequestError
from ...core.policies.sharding import NONE
from ...core.trace.throughput import StepTotals
from ..bundled_models import bundled_model, is_bundled
from ..output import note
from .options import ATTENTION, PlanOptions

if TYPE_CHECKING:
    from ...core.search.problem.blocks import Blocks


@frozen
class PlanningCosts:
    """Operators with costs.

    Args:
        graph: with times on the cluster's slowest type of device, or on this host.
        by_type: with times on each type of device; empty if they are equal on all devices.
        parameter_sizes: bytes of every parameter; None if the graph does not have them.
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


def model_costs(options: PlanOptions, cluster: Cluster, microbatches: int, tensor: int = 1) -> PlanningCosts:
    """Costs of a model on a cluster: from the description of its devices, or measured if it is this host.

    Raises:
        RequestError: an unknown number type or optimizer, a device without a type, or a model that cannot be captured.
    """
    if options.dtype is not None and options.dtype not in NUMBER_TYPES:
        raise RequestError(f"there is no number type '{options.dtype}': use one of {', '.join(NUMBER_TYPES)}")
    find_optimizer(options.optimizer or DEFAULT)
    if CPU.fullmatch(options.cluster):
        return _measured(options, microbatches)
    types = [required_type(cluster, i) for i in range(len(cluster.devices))]
    found = _analytic(options, types, microbatches, tensor)

    def of_group(graph: OpGraph) -> OpGraph:
        if isinstance(cluster, GroupedCluster):
            counts = {TENSOR_RANKS: cluster.tensor, CONTEXT_RANKS: cluster.context, EXPERT_RANKS: cluster.experts}
            rings = {kind: Ring(count, *cluster.slowest(kind)) for kind, count in counts.items() if count > 1}
            graph = with_reduction_times(graph, rings, _overlap(options, types[0], tensor))
            graph = _with_common_parameters(graph, cluster, shares=options.shard != NONE)
        return graph if options.every is None else recomputing_layers(graph, options.every)

    return evolve(
        found, graph=of_group(found.graph), by_type={name: of_group(graph) for name, graph in found.by_type.items()}
    )


def _with_common_parameters(graph: OpGraph, cluster: GroupedCluster, *, shares: bool) -> OpGraph:
    """The graph with the sums of gradients over the context and expert ranks that have the same parameters.

    They follow the sums over replicas, and are exposed. Experts are on one of the expert ranks.

    Args:
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
            copies=parts,
        )

    return evolve(graph, nodes=tuple(map(changed, graph.nodes))) if kinds else graph


def _overlap(options: PlanOptions, device: DeviceType, tensor: int) -> Overlap:
    """What tensor ranks wait for, by ``--tp-overlap``.

    ``backward``: Megatron-LM sums gradients of a column layer's input while it computes those of its weights (async
    communication, arXiv 2205.05198, section 4.2.2); with sequence parallelism, of three collectives of a layer in the
    backward, the gather before a row layer's gradients is exposed. ``all``: Transformer Engine's user buffers divide
    collectives and products into as many parts as there are ranks, of which the first is exposed.
    """
    slowed = (device.communication_multiprocessors or 0) / (device.multiprocessors or 1)
    if options.tp_overlap == "backward":
        return Overlap(1.0, 1 / 3 if options.sequence_parallel else 0.0, slowed)
    if options.tp_overlap == "all":
        return Overlap(1 / tensor, 1 / tensor, slowed)
    return Overlap()


def _measured(options: PlanOptions, microbatches: int) -> PlanningCosts:
    from ..models import planned_model

    assert options.model is not None
    planned = planned_model(
        options.model, microbatches, batch=options.batch, sequence=options.sequence, dtype=options.dtype
    )
    note("timing the model's operators on this host")
    optimizer = find_optimizer(options.optimizer) if options.optimizer else None
    graph = planned.measured(optimizer)
    return PlanningCosts(graph, {}, planned.sizes, _known(options, planned.work()))


def _analytic(options: PlanOptions, devices: Sequence[DeviceType], microbatches: int, tensor: int) -> PlanningCosts:
    from ...core.analytic.context import over_context
    from ...core.analytic.model import ModelWork, costs_by_type, model_work
    from ...core.analytic.roofline import rate_of
    from ..models import PlannedModel, planned_model

    assert options.model is not None
    name, context, experts, by_tokens = options.model, options.cp, options.ep, options.sequence_parallel and tensor > 1
    batch, sequence = options.batch, options.sequence
    if context > 1 or experts > 1:
        batch, sequence = _of_rank(options, name, microbatches)

    def work_with(repeat: bool) -> tuple[PlannedModel, ModelWork | None]:
        planned = planned_model(
            name, microbatches, batch=batch, sequence=sequence, dtype=options.dtype, empty=True,
            tensor=tensor, by_tokens=by_tokens, experts=experts, repeat=repeat,
        )  # fmt: skip
        own = model_work(
            planned.operators, options.kernels, gathers_again=by_tokens, attends_again=options.within == ATTENTION
        )
        if context > 1:
            own = over_context(own, context, options.cp_order)
        return planned, own if planned.repeated is None else planned.repeated.expanded(own)

    planned, found = work_with(repeat=True)
    if found is None:  # the layers are equal, and what they do is not
        planned, found = work_with(repeat=False)
    assert found is not None
    products, optimizer = options.dtype or "", find_optimizer(options.optimizer or DEFAULT)
    graphs = costs_by_type(found, dict.fromkeys(devices), optimizer=optimizer, products=products)
    peaks = [rate_of(device, found.number_type, products) for device in devices]
    slowest = max(graphs, key=lambda name: sum(node.forward_s for node in graphs[name].nodes))
    if len(graphs) > 1:
        note(f"each stage has the costs of its own device's type: {', '.join(graphs)}")
    return PlanningCosts(
        graphs[slowest], graphs if len(graphs) > 1 else {}, planned.sizes,
        _known(options, _of_all_ranks(planned.work(found.flops), context, experts)), peaks, _step_error(devices),
    )  # fmt: skip


def _of_rank(options: PlanOptions, name: str, microbatches: int) -> tuple[int | None, int]:
    """Samples of a step, and tokens of each, that one of the context and expert ranks has of a bundled model."""
    context, experts, batch = options.cp, options.ep, options.batch
    if not is_bundled(name):
        raise RequestError(
            f"--cp and --ep are for bundled models and files of a config.json, and '{name}' is a function: "
            "leave them out"
        )
    sequence = options.sequence or bundled_model(name).sequence
    parts = 2 * context if options.cp_order == ZIGZAG and context > 1 else context
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


def _known(given: PlanOptions, found: StepTotals) -> StepTotals:
    """The user's numbers, and those found where the user gave none."""
    return StepTotals(
        given.samples if given.samples is not None else found.samples,
        given.tokens if given.tokens is not None else found.tokens,
        found.flops,
    )
