"""What a plan is made from: operators with costs on each type of device, and what one step works on."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import frozen

from ..core.cluster.catalog.find import CPU, required_type
from ..core.cluster.cluster import Cluster
from ..core.cluster.device_type import NUMBER_TYPES, DeviceType
from ..core.costs.analytic.optimizers import DEFAULT, find_optimizer
from ..core.costs.graph import OpGraph, read_graph
from ..core.errors import RequestError
from ..core.trace.throughput import Work
from .output import note


@frozen
class ModelRequest:
    """What the command line says of a model.

    Args:
        name: ``module:factory``, or of a bundled model.
        batch, sequence: samples and tokens of a bundled model's batch, or None.
        dtype: number type to train in; the model's own if None.
        optimizer: whose state is kept; the default if None.
    """

    name: str
    batch: int | None = None
    sequence: int | None = None
    dtype: str | None = None
    optimizer: str | None = None


@frozen
class PlanningCosts:
    """Operators with costs.

    Args:
        graph: with times on the cluster's slowest type of device, or on this host.
        by_type: with times on each type of device; empty where they are the same everywhere.
        parameter_sizes: bytes of every parameter; None where a graph does not say.
        work: what one step works on.
        peak_flops_per_s: of every device for the number type of most of the model's FLOPs; None where not known.
    """

    graph: OpGraph
    by_type: Mapping[str, OpGraph]
    parameter_sizes: Mapping[str, int] | None
    work: Work
    peak_flops_per_s: Sequence[float] | None = None

    @property
    def graphs(self) -> tuple[OpGraph, ...]:
        """The operators with their costs on each type of device."""
        return tuple(self.by_type.values()) or (self.graph,)


def graph_costs(path: Path, work: Work) -> PlanningCosts:
    """Costs as an operator-graph file states them."""
    return PlanningCosts(read_graph(path), {}, None, work)


def model_costs(request: ModelRequest, cluster: Cluster, name: str, microbatches: int, work: Work) -> PlanningCosts:
    """Costs of a model on a cluster: from a description of its devices, or measured where it is this host.

    Args:
        request: the model.
        cluster: to plan for.
        name: what the command line calls the cluster.
        microbatches: that the batch is cut into.
        work: what is known of a step beforehand; it has precedence.

    Raises:
        RequestError: an unknown number type or optimizer, a device without a type, or a model that cannot be captured.
    """
    if request.dtype is not None and request.dtype not in NUMBER_TYPES:
        raise RequestError(f"there is no number type '{request.dtype}': use one of {', '.join(NUMBER_TYPES)}")
    find_optimizer(request.optimizer or DEFAULT)
    if CPU.fullmatch(name):
        return _measured(request, microbatches, work)
    return _analytic(request, [required_type(cluster, i) for i in range(len(cluster.devices))], microbatches, work)


def _measured(request: ModelRequest, microbatches: int, work: Work) -> PlanningCosts:
    from .models import planned_model

    planned = planned_model(
        request.name, microbatches, batch=request.batch, sequence=request.sequence, dtype=request.dtype
    )
    note("timing the model's operators on this host")
    optimizer = find_optimizer(request.optimizer) if request.optimizer else None
    graph = planned.measured(optimizer)
    return PlanningCosts(graph, {}, planned.sizes, _known(work, planned.work()))


def _analytic(request: ModelRequest, devices: Sequence[DeviceType], microbatches: int, work: Work) -> PlanningCosts:
    from ..core.costs.analytic.model import costs_by_type, model_work
    from ..core.costs.analytic.roofline import rate_of
    from .models import planned_model

    planned = planned_model(
        request.name, microbatches, batch=request.batch, sequence=request.sequence, dtype=request.dtype, empty=True
    )
    note(f"deriving the costs of its {len(planned.operators.graph.nodes)} operators")
    found = model_work(planned.operators)
    tf32, optimizer = request.dtype == "tf32", find_optimizer(request.optimizer or DEFAULT)
    graphs = costs_by_type(found, dict.fromkeys(devices), optimizer=optimizer, tf32=tf32)
    peaks = [rate_of(device, found.number_type, tf32) for device in devices]
    slowest = max(graphs, key=lambda name: sum(node.forward_s for node in graphs[name].nodes))
    if len(graphs) > 1:
        note(f"a stage costs what it takes on its own device: {', '.join(graphs)}")
    return PlanningCosts(
        graphs[slowest], graphs if len(graphs) > 1 else {}, planned.sizes,
        _known(work, planned.work(found.flops)), peaks,
    )  # fmt: skip


def _known(told: Work, found: Work) -> Work:
    """What the user told, and where the user told nothing what was found."""
    return Work(
        told.samples if told.samples is not None else found.samples,
        told.tokens if told.tokens is not None else found.tokens,
        found.flops,
    )
