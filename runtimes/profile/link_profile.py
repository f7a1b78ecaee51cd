"""Measuring the links between the devices at hand, and this machine as a cluster."""

import statistics
from collections.abc import Mapping, Sequence

import torch

from ...backends.contract import Backend
from ...core.cluster.cluster import Cluster, fully_connected
from ..devices.available_memory import bytes_left, machine_bytes
from ..devices.compute import finished_s, transfer_s
from ..launch.team import Team
from .reference_workload import workload_bytes


def profile_link(
    backend: Backend,
    device: torch.device,
    sizes: Sequence[int] = (64, 1 << 16, 1 << 18, 1 << 20, 1 << 22),
    repeats: int = 8,
) -> tuple[float, float]:
    """Latency and bandwidth between neighbouring devices, by ping-pong between each even device and the next.

    A message takes half a round trip; on streams what lies between the events around it, without the host's part, which
    runs ahead in a step.

    Args:
        backend: this device's end of the transport.
        device: where the tensors are.
        sizes: bytes of the messages, which are of float32: every backend moves that.
        repeats: round trips for each size; the median counts.

    Returns:
        (latency in seconds, bytes per second) of one direction, from a least-squares line; devices without a partner
        return (0, 0).
    """
    peer = backend.device ^ 1
    if peer >= backend.devices:
        return 0.0, 0.0
    one_way = []
    for size in sizes:
        message, times = [torch.zeros(size // 4, device=device)], []
        answer = [torch.empty(size // 4, device=device)]
        for _ in range(repeats):
            start = finished_s(device)
            if backend.device < peer:
                sent = backend.send(message, peer)
                backend.receive(answer, peer).wait()
                sent.wait()
            else:
                backend.receive(answer, peer).wait()
                sent = backend.send(message, peer)
                sent.wait()
            round_trip = finished_s(device) - start
            alone = transfer_s(sent, device)
            times.append(round_trip / 2 if alone is None else alone)
        one_way.append(statistics.median(times))
    xs, ys = list(map(float, sizes)), one_way
    slope, intercept = statistics.linear_regression(xs, ys)
    return max(intercept, min(ys) / 2), 1 / max(slope, 1e-12)


def measured_cluster(team: Team, where: torch.device | Mapping[int, torch.device]) -> Cluster:
    """This machine as a cluster: its devices share its memory, links as fast as ping-pong between neighbours.

    Args:
        team: the devices.
        where: device of this process → the torch device that it computes on; or the one for all.
    """
    on = dict.fromkeys(team.local, where) if isinstance(where, torch.device) else where
    memory = memory_of_each(team, on)
    if team.mesh.ranks == 1:
        return fully_connected(1, memory, 1e9, 1e-6)
    measured = [pair for pair in team.everywhere(lambda d: profile_link(_link(team, d), on[d])) if pair[1] > 0]
    latency = statistics.median(pair[0] for pair in measured)
    rate = statistics.median(pair[1] for pair in measured)
    return team.decide(lambda: fully_connected(team.mesh.ranks, memory, rate, latency))


def _link(team: Team, device: int) -> Backend:
    """The end to measure with: along the pipeline, or to the replicas of a pipeline of one device."""
    replicas = team.replicas_of(device)
    return team.backend(device) if team.size > 1 or replicas is None else replicas


def memory_of_each(team: Team, where: torch.device | Mapping[int, torch.device]) -> int:
    """Bytes of each device: an equal share of the machine's, or of a GPU's among the devices of this process on it.

    No device has more than the operating system leaves to the process that has least. What the reference workload
    allocates is left out: it runs while the device holds its stages.

    Args:
        team: the devices.
        where: device of this process → the torch device that it computes on; or the one for all.
    """
    on = dict.fromkeys(team.local, where) if isinstance(where, torch.device) else where

    def room(device: int) -> int:
        here = on[device]
        if here.type == "cuda":
            return _memory(here) // list(on.values()).count(here) - workload_bytes(here)
        left = bytes_left()
        shares = [_memory(here) // team.mesh.ranks, *([] if left is None else [left // len(team.local)])]
        return min(shares) - workload_bytes(here)

    return max(min(team.everywhere(room)), 0)


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)  # without what contexts and other processes have taken
        return int(free) + torch.cuda.memory_reserved(device)
    return machine_bytes()
