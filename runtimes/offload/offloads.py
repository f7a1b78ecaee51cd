"""Which storages of saved tensors a plan offloads, and the arenas of the devices of this process for them."""

import os
import socket
from collections.abc import Mapping, Sequence

import torch

from ...core.analytic.model import saved_values
from ...core.capture.graph.nodes import root_of
from ...core.capture.programs.stage_programs import SavedStorage
from ...core.errors import RequestError
from ...core.logs import LOGGER
from ...core.offload.plan_offload import SMALLEST_BYTES
from ...core.plan.memory_policy import Storage
from ...core.plan.plan import Plan
from ..devices.available_memory import bytes_left, container_bytes, physical_bytes
from ..launch.team import Team
from ..programs.compiled import Compiled
from .device_offload import DeviceOffload, slots_of
from .tier import OffloadTier


def offloads(
    plan: Plan, compiled: Compiled, team: Team, where: Mapping[int, torch.device], tier: OffloadTier
) -> dict[int, DeviceOffload]:
    """The offload of each device of this process; empty where the plan has none. All ranks call this together.

    Raises:
        RequestError: the plan names storages that are not there or cannot leave, or there is no space for them.
    """
    if not plan.memory.offload:
        return {}
    _log_what_stays(plan, compiled, team)
    with team.agreeing():
        _check_tier(tier, where)
        sizes = {device: _arena_bytes(plan, device, compiled) for device in team.local}
    _check_hosts(team, sizes, tier)
    found, failure = dict[int, DeviceOffload](), None
    try:
        for device, size in sizes.items():
            separate = plan.memory.host_copy_queues == 2
            found[device] = DeviceOffload(tier, where[device], device, separate=separate)
            found[device].reserve(size)
    except (RequestError, MemoryError, RuntimeError) as error:
        failure = error
    try:
        team.agree(failure)
    except BaseException:
        for each in found.values():
            each.close()
        raise
    return found


def _log_what_stays(plan: Plan, compiled: Compiled, team: Team) -> None:
    """List the storages of the stages here that could not leave in any plan, each with the reason."""
    small = f"it is smaller than {SMALLEST_BYTES} bytes"
    for stage in (each.stage for each in plan.memory.offload if plan.placement[each.stage] in team.local):
        for storage in compiled.programs[stage].storages:
            why = reason_to_keep(storage, stage, compiled, plan.placement)
            if why or storage.bytes < SMALLEST_BYTES:
                LOGGER.info(
                    "stage %d: saved tensor '%s' of %d bytes stays on its device: %s",
                    stage, storage.name, storage.bytes, why or small,
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


def reason_to_keep(storage: SavedStorage, stage: int, compiled: Compiled, placement: Sequence[int]) -> str:
    """Why a storage of a stage's saved tensors cannot be offloaded; empty if it can."""
    if storage.boundary and storage.origin in _from_same_device(stage, compiled, placement):
        return "a stage of the same device sends it, and may hold it"
    return storage.held


def offloadable_storages(stage: int, compiled: Compiled, placement: Sequence[int]) -> tuple[Storage, ...]:
    """The storages of a stage that can be offloaded and are large enough."""
    return tuple(
        Storage(storage.name, storage.bytes)
        for storage in compiled.programs[stage].storages
        if storage.bytes >= SMALLEST_BYTES and not reason_to_keep(storage, stage, compiled, placement)
    )


def offloaded_storages(plan: Plan, stage: int, compiled: Compiled, *, known: bool = False) -> tuple[SavedStorage, ...]:
    """The storages of a stage that a plan offloads.

    The plan names storages. Where it was made for an operator graph it names operators, and the storages that these are
    the first to save are offloaded: the bytes that the graph has for them.

    Args:
        known: whether every name must be a storage of this stage that can leave. For other shapes than the example's,
            one that is not there, or that the stage sends on there, stays on the device.

    Raises:
        RequestError: with ``known``: a storage cannot leave, or there is none of that name.
    """
    wanted = next((each for each in plan.memory.offload if each.stage == stage), None)
    if wanted is None:
        return ()
    storages = compiled.programs[stage].storages
    named = {storage.name for storage in wanted.storages}
    operators = (named - {storage.name for storage in storages}) & set(compiled.stages[stage])
    if known:
        missing = named - {storage.name for storage in storages} - operators
        if missing:
            raise RequestError(
                f"the plan offloads '{min(missing)}' of stage {stage}, which has no saved tensor of that name: correct "
                "memory.offload, or plan again"
            )
    saved_by = _saved_by(operators, storages, compiled) if operators else set()
    found = []
    for storage in storages:
        why = reason_to_keep(storage, stage, compiled, plan.placement)
        if storage.name in named and why and known:
            raise RequestError(
                f"the plan offloads '{storage.name}' of stage {stage}, which stays on its device: {why}; remove it "
                "from memory.offload, or plan again"
            )
        if why:
            continue
        if storage.name in named or (storage.name in saved_by and storage.bytes >= SMALLEST_BYTES):
            found.append(storage)
    return tuple(found)


def _saved_by(names: set[str], storages: Sequence[SavedStorage], compiled: Compiled) -> set[str]:
    """The storages that some operators are the first to save."""
    operators, found = compiled.operators, set()
    values = saved_values(operators)
    first = {name for operator in names for name in values[operator]}
    shared = {name for own in values.values() for name in own}
    for storage in storages:
        if storage.origin is None:
            continue
        root = root_of(operators.nodes[storage.origin]).name
        inner = root not in shared and operators.owner.get(root) in names
        if root in first or inner:
            found.add(storage.name)
    return found


def _from_same_device(stage: int, compiled: Compiled, placement: Sequence[int]) -> set[str]:
    return {
        tensor.name
        for (sender, reader), tensors in compiled.layout.items()
        if reader == stage and placement[sender] == placement[stage]
        for tensor in tensors
    }
