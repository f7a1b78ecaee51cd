"""Checks of a plan's offload: no action reads tensors that are on the host; a stage offloads at most what it saves."""

from collections import Counter
from collections.abc import Mapping

from ...actions import COMPUTE_KINDS, Action, Kind
from ...errors import RequestError
from ..offload import HostCopy, StageOffload, backward_of
from ..plan import Plan


def check_offload(plan: Plan) -> None:
    """Check the offload of the memory policy.

    Args:
        plan: its stages, compute orders and costs are sound.

    Raises:
        RequestError: what is wrong, with the action.
    """
    if plan.memory.host_copy_queues not in (1, 2):
        raise RequestError(
            f"memory.host_copy_queues is {plan.memory.host_copy_queues}: a device has 1 queue for both directions, or "
            "2, one for each"
        )
    positions: dict[int, dict[Action, int]] = {}
    for each in plan.memory.offload:
        device = plan.placement[each.stage]
        if device not in positions:
            positions[device] = {action: at for at, action in enumerate(plan.device_actions[device])}
        _check_storages(plan, each)
        _check_microbatches(plan, each)
        for copy in each.copies:
            _check_copy(each.stage, device, copy, positions[device])


def _check_storages(plan: Plan, offload: StageOffload) -> None:
    where = f"memory.offload of stage {offload.stage}"
    if offload.stage in plan.memory.recompute:
        raise RequestError(
            f"{where}: the stage is also in memory.recompute and keeps no saved tensors to offload; remove it from one "
            "of the two"
        )
    if not offload.storages:
        raise RequestError(f"{where} names no storages: name some, or remove the stage")
    counts = Counter(storage.name for storage in offload.storages)
    twice = next((name for name, count in counts.items() if count > 1), None)
    if twice is not None:
        raise RequestError(f"{where} names storage '{twice}' twice: a storage is offloaded once; remove one")
    empty = next((storage for storage in offload.storages if storage.bytes <= 0), None)
    if empty is not None:
        raise RequestError(f"{where}: storage '{empty.name}' has {empty.bytes} bytes: it must be above 0")
    if plan.prediction is not None:
        saved = plan.prediction.costs[offload.stage].saved_bytes
        if offload.bytes > saved:
            raise RequestError(
                f"{where}: its storages have {offload.bytes} bytes, and the stage saves {saved:.0f} bytes of a "
                "microbatch: remove some, or correct the sizes"
            )


def _check_microbatches(plan: Plan, offload: StageOffload) -> None:
    where = f"memory.offload of stage {offload.stage}"
    if not offload.copies:
        raise RequestError(f"{where} has no copies: give one for each offloaded microbatch, or remove the stage")
    microbatches = [copy.microbatch for copy in offload.copies]
    if microbatches != sorted(set(microbatches) & set(range(plan.microbatches))):
        raise RequestError(
            f"{where} has copies of microbatches {microbatches}: they go from 0 to {plan.microbatches - 1}, each at "
            "most once and in order; correct the list"
        )


def _check_copy(stage: int, device: int, copy: HostCopy, positions: Mapping[Action, int]) -> None:
    """F, then freed_at, then reload_after (at the earliest the same action), then the backward."""
    microbatch = copy.microbatch
    where = f"memory.offload of stage {stage}, microbatch {microbatch}"
    for name, action in (("freed_at", copy.freed_at), ("reload_after", copy.reload_after)):
        if action not in positions:
            rule = "is not compute" if action.kind not in COMPUTE_KINDS else f"is not in the order of device {device}"
            raise RequestError(f"{where}: {name} is {action}, which {rule}: name an F, B, I or W of that device")
    forward = Action(stage, Kind.F, microbatch)
    backward = backward_of(stage, microbatch, positions)
    freed, back = positions[copy.freed_at], positions[copy.reload_after]
    if freed <= positions[forward]:
        raise RequestError(
            f"{where}: freed_at is {copy.freed_at}, which is not after {forward}: the copy out starts when that ends; "
            "name a later action"
        )
    if back < freed:
        raise RequestError(
            f"{where}: reload_after is {copy.reload_after}, which is before freed_at, {copy.freed_at}: name that "
            "action or a later one"
        )
    if back >= positions[backward]:
        raise RequestError(
            f"{where}: reload_after is {copy.reload_after}, and {backward} reads the saved tensors, which are on the "
            f"host until {Action(stage, Kind.RELOAD, microbatch)} has ended: name an action before it"
        )
