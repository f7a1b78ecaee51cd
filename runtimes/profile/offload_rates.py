"""How fast saved tensors go to the host and back: measured on all devices at once, through the copies of a step."""

import socket
import statistics
from collections.abc import Mapping

import torch
from attrs import evolve

from ...core.cluster.cluster import Cluster, Hub
from ...core.cluster.routing import Link
from ..devices.compute import compute_queue
from ..launch.team import Team
from ..offload.copies import Part
from ..offload.host_memory import HostMemory
from ..offload.offloads import usable_bytes
from ..offload.tier import OffloadTier

SIZE = 32 << 20
"""Bytes of a copy: as the saved tensors of a small stage."""
REPEATS = 5

HOST = "host"
"""Names of the hubs in a measured cluster start with it."""


def host_rates(tier: OffloadTier, device: torch.device, number: int, size: int | None = None) -> tuple[float, float]:
    """Bytes per second out and back, the median of some copies.

    Args:
        tier: where they go.
        device: the torch device.
        number: of the device along the pipeline.
        size: bytes of a copy; ``SIZE`` by default.

    Raises:
        RequestError: there is no space for one.
    """
    size = SIZE if size is None else size
    memory, queue = HostMemory(tier, device, number), compute_queue(device, number)
    memory.reserve(size)
    try:
        queue.begin(True)
        with queue.active():
            data = torch.zeros(size, dtype=torch.uint8, device=device)
            rates: tuple[list[float], list[float]] = ([], [])
            for _ in range(REPEATS + 1):
                out = memory.copies.out([Part(data, 0)])
                out.wait()
                back = memory.copies.back([Part(data, 0)], out)
                back.wait()
                for found, copy in zip(rates, (out, back), strict=True):
                    took = queue.nanoseconds(copy.ended_ns) - queue.nanoseconds(copy.started_ns)
                    found.append(size / max(took, 1) * 1e9)
        queue.end()
    finally:
        memory.close()
    return statistics.median(rates[0][1:]), statistics.median(rates[1][1:])


def with_hosts(cluster: Cluster, team: Team, where: Mapping[int, torch.device], tier: OffloadTier) -> Cluster:
    """A measured cluster with the hosts that saved tensors go to, each device on a link of its own.

    The rates are those of all devices at once, so that what they share is in them. All ranks call this together.

    Args:
        cluster: without hosts.
        team: the devices.
        where: device of this process → the torch device that it computes on.
        tier: where saved tensors go.
    """
    here = socket.gethostname(), usable_bytes(tier)[0]
    found = team.everywhere(lambda device: (*here, *host_rates(tier, where[device], device)))
    names = list(dict.fromkeys(host for host, *_ in found))
    hubs = [
        Hub(f"{HOST} {number}", "host", min(usable for host, usable, *_ in found if host == name))
        for number, name in enumerate(names)
    ]
    # No message between devices is to take this way, as paths are chosen by latency.
    latency_s = max((link.latency_s for link in cluster.links), default=0.0)
    ranks = team.mesh.cluster_devices
    links = [
        Link(cluster.devices[rank].name, hubs[names.index(host)].name, out, latency_s, back_bytes_per_s=back)
        for rank, (host, _, out, back) in zip(ranks, found, strict=True)
    ]
    return evolve(cluster, hubs=(*cluster.hubs, *hubs), links=(*cluster.links, *links))
