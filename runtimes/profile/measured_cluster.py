"""A cluster that describes this machine: the memory of its devices, and links measured between neighbours."""

import statistics
from collections.abc import Mapping

import torch

from ...backends.contract import Backend
from ...core.cluster.cluster import Cluster, fully_connected
from ...core.cluster.links.lines import fit_line
from ..devices.available_memory import bytes_left, machine_bytes
from ..launch.team import Team
from .link_measurements import neighbour_times
from .reference_workload import workload_bytes


def measured_cluster(team: Team, where: torch.device | Mapping[int, torch.device]) -> Cluster:
    """A cluster that describes this machine: devices share its memory, and all links have the speed of neighbours.

    Args:
        team: the devices.
        where: device of this process → its torch device; or one torch device for all.
    """
    on = dict.fromkeys(team.local, where) if isinstance(where, torch.device) else where
    memory = memory_of_each(team, on)
    if team.mesh.ranks == 1:
        return fully_connected(1, memory, 1e9, 1e-6)
    measured = [times for times in team.everywhere(lambda d: neighbour_times(_link(team, d), on[d])) if times]
    lines = [fit_line(list(times), list(times.values())) for times in measured]
    latency = statistics.median(line.latency_s for line in lines)
    rate = statistics.median(line.bytes_per_s for line in lines)
    return team.decide(lambda: fully_connected(team.mesh.ranks, memory, rate, latency))


def _link(team: Team, device: int) -> Backend:
    """The transport to measure: along the pipeline, or between the replicas of a pipeline of one device."""
    replicas = team.replicas_of(device)
    return team.backend(device) if team.size > 1 or replicas is None else replicas


def memory_of_each(team: Team, where: torch.device | Mapping[int, torch.device]) -> int:
    """Bytes of memory of each device: an equal share of the machine's, or of its GPU's among devices on that GPU.

    It is at most what the operating system still allows the process with the lowest limit. The bytes of the reference
    workload are subtracted: it runs while the device holds its stages.

    Args:
        team: the devices.
        where: device of this process → its torch device; or one torch device for all.
    """
    on = dict.fromkeys(team.local, where) if isinstance(where, torch.device) else where

    def available(device: int) -> int:
        here = on[device]
        if here.type == "cuda":
            return _memory(here) // list(on.values()).count(here) - workload_bytes(here)
        left = bytes_left()
        shares = [_memory(here) // team.mesh.ranks, *([] if left is None else [left // len(team.local)])]
        return min(shares) - workload_bytes(here)

    return max(min(team.everywhere(available)), 0)


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)  # without the memory of CUDA contexts and other processes
        return int(free) + torch.cuda.memory_reserved(device)
    return machine_bytes()
