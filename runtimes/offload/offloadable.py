"""Which storages of a stage's saved tensors can be offloaded, and which of them a plan offloads."""

from collections.abc import Sequence

from ...core.analytic.model import saved_values
from ...core.capture.graph.nodes import root_of
from ...core.capture.programs.stage_programs import SavedStorage
from ...core.errors import RequestError
from ...core.offload.storages import SMALLEST_BYTES
from ...core.plan.memory_policy import StageOffload, Storage
from ...core.plan.plan import Plan
from ..programs.compiled import Compiled


def reason_to_keep(storage: SavedStorage, stage: int, compiled: Compiled, placement: Sequence[int]) -> str:
    """Why a storage cannot be offloaded; empty if it can.

    Args:
        storage: of a stage's saved tensors.
        placement: device of every stage.
    """
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


def kept_storages(stage: int, compiled: Compiled, placement: Sequence[int]) -> tuple[tuple[SavedStorage, str], ...]:
    """The storages of a stage that stay on the device, each with the reason."""
    small = f"it is smaller than {SMALLEST_BYTES} bytes"
    found = (
        (
            storage,
            reason_to_keep(storage, stage, compiled, placement) or (small if storage.bytes < SMALLEST_BYTES else ""),
        )
        for storage in compiled.programs[stage].storages
    )
    return tuple((storage, why) for storage, why in found if why)


def offloaded_storages(plan: Plan, stage: int, compiled: Compiled, *, known: bool = False) -> tuple[SavedStorage, ...]:
    """The storages of a stage that a plan offloads.

    The plan names storages. Where it was made for an operator graph it names operators, and the storages that these are
    the first to save are offloaded: the bytes that the graph has for them.

    Args:
        compiled: the programs, for one shape of microbatch.
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
        _refuse_unknown(wanted, {*(storage.name for storage in storages), *operators})
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


def _refuse_unknown(wanted: StageOffload, known: set[str]) -> None:
    missing = next((storage.name for storage in wanted.storages if storage.name not in known), None)
    if missing is not None:
        raise RequestError(
            f"the plan offloads '{missing}' of stage {wanted.stage}, which has no saved tensor of that name: correct "
            "memory.offload, or plan again"
        )


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
