"""The workload of a step, and the settings that distribute it over a cluster: replicas, microbatch sizes, devices."""

from collections.abc import Callable, Mapping, Sequence

from attrs import frozen

from ...cluster.catalog.find import required_type
from ...cluster.cluster import Cluster
from ...costs.graph import OpGraph
from ...errors import RequestError
from .arrangements import arrangements
from .setting import Setting

CostsOf = Callable[[int], tuple[OpGraph, ...]]
"""Samples per microbatch → the operators with their costs on each kind of device."""
SETTINGS = 6
"""Number of settings that are searched: those with the smallest estimates."""


@frozen
class Workload:
    """A training step, independent of the cluster's links.

    Args:
        costs: see :data:`CostsOf`; called once for each size.
        batch: samples of a step, over all replicas.
        sizes: samples of a microbatch, to choose among.
        kinds: index into the costs for each of the cluster's devices.
        parameter_sizes: bytes of each parameter, if known.
    """

    costs: CostsOf
    batch: int
    sizes: tuple[int, ...]
    kinds: tuple[int, ...]
    parameter_sizes: Mapping[str, int] | None = None


def workload_of(
    graph: OpGraph, cluster: Cluster, microbatches: int, parameter_sizes: Mapping[str, int] | None = None
) -> Workload:
    """A step of ``microbatches`` microbatches of one size, with equal costs on every device."""
    return Workload(lambda _: (graph,), microbatches, (1,), (0,) * len(cluster.devices), parameter_sizes)


def kinds_of(types: Sequence[str], cluster: Cluster) -> tuple[int, ...]:
    """Index into the costs for each device of a cluster, if they are given by type of device.

    Raises:
        RequestError: there are several, and a device has no type.
    """
    if len(types) < 2:
        return (0,) * len(cluster.devices)
    return tuple(types.index(required_type(cluster, device).name) for device in range(len(cluster.devices)))


def meshes(devices: int) -> list[tuple[int, int]]:
    """Every (pipeline length, number of replicas) for a number of devices, the longest pipeline first."""
    return [(pipeline, devices // pipeline) for pipeline in range(devices, 0, -1) if devices % pipeline == 0]


def settings_of(
    work: Workload,
    cluster: Cluster,
    memory: Sequence[float],
    wanted: Sequence[tuple[int, int]],
    chunks: int = 1,
) -> list[Setting]:
    """The settings to search, the most promising first.

    Args:
        wanted: pipeline and data dimensions to choose among (see :func:`meshes`).
        chunks: fewest stages per device.

    Raises:
        RequestError: no microbatch size divides the batch among the replicas, or a pipeline is longer than the
            graph has operators.
    """
    graphs = {size: work.costs(size) for size in work.sizes}
    operators = min(len(found[0].nodes) for found in graphs.values())
    result = []
    for pipeline, data in wanted:
        if pipeline * chunks > operators:
            continue
        for size, found in graphs.items():
            count, rest = divmod(work.batch, data * size)
            if rest or not count:
                continue
            for replicas in arrangements(cluster, pipeline, data):
                result.append(Setting(found, cluster, replicas, count, work.kinds, tuple(memory), work.parameter_sizes))
    if all(pipeline * chunks > operators for pipeline, _ in wanted):
        devices = min(pipeline for pipeline, _ in wanted)
        each = "" if chunks == 1 else f" with {chunks} stages each"
        raise RequestError(
            f"there are {devices} devices{each} for {operators} operators: a stage needs at least one operator; "
            f"use at most {operators // chunks} devices"
        )
    if not result:
        raise RequestError(
            f"a batch of {work.batch} on {len(cluster.devices)} devices with {operators} operators has no mesh of "
            f"{_listed(wanted)} with microbatches of {', '.join(map(str, work.sizes))}: every replica needs at least "
            "one whole microbatch, and every stage an operator; give another batch or mesh"
        )
    ranked = sorted(result, key=lambda setting: setting.estimate)
    possible = [setting for setting in ranked if not setting.estimate[0]]
    return (possible or ranked)[:SETTINGS]


def _listed(wanted: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{pipeline} × {data}" for pipeline, data in wanted)
