"""The offload of a plan on the devices of this process, with their arenas, before the first step."""

import os
import socket
from collections.abc import Mapping

import torch

from ...core.errors import RequestError
from ...core.logs import LOGGER
from ...core.plan.plan import Plan
from ..devices.available_memory import bytes_left, container_bytes, physical_bytes
from ..launch.team import Team
from ..programs.compiled import Compiled
from .device_offload import DeviceOffload, slots_of
from .host_memory import HostMemory
from .offloadable import kept_storages, offloaded_storages
from .tier import OffloadTier


def offloads(
    plan: Plan, compiled: Compiled, team: Team, where: Mapping[int, torch.device], tier: OffloadTier
) -> dict[int, DeviceOffload]:
    """The offload of each device of this process; empty where the plan has none. All ranks call this together.

    Args:
        compiled: the programs of the stages here, for the example's microbatches.
        where: device of this process → the torch device that it computes on.

    Raises:
        RequestError: the plan names storages that are not there or cannot leave, or there is no space for them.
    """
    if not plan.memory.offload:
        return {}
    _log_what_stays(plan, compiled, team)
    failure: Exception | None = None
    sizes = dict.fromkeys(team.local, 0)
    try:
        _check_tier(tier, where)
        sizes = {device: _arena_bytes(plan, device, compiled) for device in team.local}
    except RequestError as error:
        failure = error
    team.agree(failure)
    _check_hosts(team, sizes, tier)
    found = {}
    try:
        for device, size in sizes.items():
            memory = HostMemory(tier, where[device], device, separate=plan.memory.host_copy_queues == 2)
            found[device] = DeviceOffload(device, memory)
            memory.reserve(size)
    except (RequestError, MemoryError, RuntimeError) as error:
        failure = error
    try:
        team.agree(failure)
    except BaseException:
        for each in found.values():
            each.memory.close()
        raise
    return found


def _log_what_stays(plan: Plan, compiled: Compiled, team: Team) -> None:
    """List the storages of the stages here that could not leave in any plan, each with the reason."""
    for each in plan.memory.offload:
        if plan.placement[each.stage] in team.local:
            for storage, why in kept_storages(each.stage, compiled, plan.placement):
                LOGGER.info(
                    "stage %d: saved tensor '%s' of %d bytes stays on its device: %s",
                    each.stage, storage.name, storage.bytes, why,
                )  # fmt: skip


def _check_tier(tier: OffloadTier, where: Mapping[int, torch.device]) -> None:
    gpu = next((str(device) for device in where.values() if device.type != "cpu"), None)
    if tier.folder is not None and gpu is not None:
        raise RequestError(
            f"offload_to is {str(tier.to)!r} and a device of the pipeline is {gpu}: saved tensors of a GPU go to the "
            "host's memory; give offload_to='host'"
        )


def _arena_bytes(plan: Plan, device: int, compiled: Compiled) -> int:
    stages = [each.stage for each in plan.memory.offload if plan.placement[each.stage] == device]
    found = {stage: offloaded_storages(plan, stage, compiled, known=True) for stage in stages}
    return slots_of(plan, device, [found]).bytes


def _check_hosts(team: Team, sizes: Mapping[int, int], tier: OffloadTier) -> None:
    """Refuse arenas that a host has no memory for: what was planned for a host with more."""
    here = socket.gethostname(), *usable_bytes(tier)
    found = team.everywhere(lambda device: (*here, sizes[device]))
    for host, usable, limit in dict.fromkeys(each[:3] for each in found):
        asked = sum(size for name, _, _, size in found if name == host)
        if asked > usable:
            other = "a folder with more space" if tier.folder is not None else "'disk'"
            raise RequestError(
                f"the plan offloads saved tensors of {asked} bytes to host '{host}', and {usable} bytes may be used "
                f"there ({limit}): plan again with Memory(host={usable}), or give offload_to={other}"
            )


def usable_bytes(tier: OffloadTier) -> tuple[int, str]:
    """Bytes that saved tensors may occupy on this host, of its memory or of their file's file system; and by what
    limit."""
    limits: list[tuple[int | None, str]] = [(tier.host_memory, "host_memory")]
    if tier.folder is not None:
        found = os.statvfs(tier.folder)
        limits.append((found.f_bavail * found.f_frsize, f"free space of {tier.folder}"))
    else:
        limits.append((container_bytes(), "the container's memory limit"))
        limits.append((bytes_left(), "ulimit -d"))
        limits.append((physical_bytes(), "the machine's memory"))
    return min((size, name) for size, name in limits if size is not None)
