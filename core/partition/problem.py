"""What a partition is asked for: the graph, the devices, and what a stage's time and memory are counted to be."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from attrs import frozen

from ..cluster import Cluster
from ..errors import RequestError
from ..graph import OpGraph
from .ranges import RangeTables, Table

Cuts = tuple[int, ...]
"""Where stages begin in the graph's order, from 0, with the number of nodes at the end: stage s holds nodes
``cuts[s]`` to ``cuts[s + 1] - 1``."""


@frozen
class PartitionProblem:
    """Cut ``tables.graph`` into stages for the devices of ``cluster``.

    The time of a stage for one microbatch is counted as ``max(C, R, G)``: C is F + I + W, plus what the device itself
    spends on bytes that it moves; R the time that its incoming link is busy with what the stage receives, and G the
    time it is busy in the other direction with the gradients that the stage returns. Queues work beside compute, so
    whichever is slowest sets the pace. What comes from further back than the neighbour counts at the neighbour's rate.

    The memory of a device is the state of its stages, their saved tensors times the microbatches in flight, and the
    largest workspace among them.

    Args:
        tables: the graph's ranges.
        cluster: the devices.
        placement: device of every stage (see :func:`round_robin`); each device has at least one.
        in_flight: per stage, how many microbatches' saved tensors are held at the device's peak.
        limits: bytes each device may hold (see :func:`device_limits`).
        slack: how far above the least possible bottleneck, as a share of it, a stage may be where that saves bytes.
        device_s_per_byte: what a device's compute queue itself spends on a byte that it sends or receives: 0 where
            copies run beside compute.

    Raises:
        RequestError: more stages than nodes, a device without one, or ``in_flight`` or ``limits`` of another length.
    """

    tables: RangeTables
    cluster: Cluster
    placement: tuple[int, ...]
    in_flight: tuple[float, ...]
    limits: tuple[float, ...]
    slack: float = 0.0
    device_s_per_byte: float = 0.0

    def __attrs_post_init__(self) -> None:
        if set(self.placement) != set(range(self.devices)):
            raise RequestError(
                f"the stages are placed on devices {sorted(set(self.placement))} of {self.devices}: each device, "
                "numbered from 0, needs at least one stage; add chunks or leave devices out"
            )
        if self.stages > self.tables.size:
            raise RequestError(
                f"{self.stages} stages on {self.devices} devices for {self.tables.size} "
                "operators: a stage needs at least one; use fewer devices or chunks"
            )
        if len(self.in_flight) != self.stages or len(self.limits) != self.devices:
            raise RequestError(
                f"{len(self.in_flight)} numbers in flight and {len(self.limits)} limits: give one for each of "
                f"{self.stages} stages and {self.devices} devices"
            )

    @property
    def devices(self) -> int:
        return len(self.cluster.devices)

    @property
    def stages(self) -> int:
        return len(self.placement)

    def stages_on(self, device: int) -> list[int]:
        """The stages that a device holds, in order."""
        return [stage for stage, place in enumerate(self.placement) if place == device]

    def link(self, stage: int) -> tuple[float, float] | None:
        """Latency in seconds and bytes a second on the way from the stage before; None where there is none."""
        source, device = self.placement[stage - 1], self.placement[stage]
        if stage == 0 or source == device:
            return None
        links = [link for link, _ in self.cluster.path(source, device)]
        return sum(link.latency_s for link in links), min(link.bytes_per_s for link in links)

    def time_table(self, link: tuple[float, float] | None) -> Table:
        """Seconds of a stage behind ``link``, for every range."""
        tables = self.tables
        if link is None:
            return tables.compute_s
        latency, rate = link
        received, returned = tables.received_bytes, tables.returned_bytes
        time: Table = tables.compute_s + self.device_s_per_byte * (received + returned)
        for moved in (received, returned):
            np.maximum(time, moved / rate + latency * (moved > 0), out=time)
        return time

    def time_tables(self) -> list[Table]:
        """The time table of each stage; stages behind equal links share one."""
        links = [self.link(stage) for stage in range(self.stages)]
        known = {link: self.time_table(link) for link in dict.fromkeys(links)}
        return [known[link] for link in links]

    def memory_table(self, stage: int) -> Table:
        """Bytes of ``stage``, were it alone on its device, for every range."""
        tables = self.tables
        return tables.state_bytes + self.in_flight[stage] * tables.saved_bytes + tables.workspace_bytes

    def whole_bytes(self, stage: int) -> float:
        """Bytes of ``stage`` were it the whole graph, the most that any range needs."""
        tables = self.tables
        saved = self.in_flight[stage] * tables.saved_bytes[-1, 0]
        return float(tables.state_bytes[-1, 0] + saved + tables.workspace_bytes[-1, 0])


def round_robin(devices: int, chunks: int = 1) -> tuple[int, ...]:
    """Stage s on device s mod ``devices``."""
    return tuple(range(devices)) * chunks


def in_flight_1f1b(stages: int, microbatches: int) -> tuple[float, ...]:
    """Microbatches whose saved tensors each stage of 1F1B holds at its peak."""
    return tuple(float(min(stages - stage, microbatches)) for stage in range(stages))


def device_limits(cluster: Cluster, memory_limit: float | None = None) -> tuple[float, ...]:
    """Bytes that each device may hold: its memory, or ``memory_limit`` where that is less.

    Raises:
        RequestError: the limit is not above 0.
    """
    if memory_limit is not None and not memory_limit > 0:
        raise RequestError(f"a memory limit of {memory_limit} bytes: it must be above 0")
    return tuple(min(device.memory_bytes, memory_limit or device.memory_bytes) for device in cluster.devices)


def stages_of(graph: OpGraph, cuts: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """Names of the nodes of each stage."""
    return tuple(tuple(node.name for node in graph.nodes[start:end]) for start, end in pairwise(cuts))
