"""Offload of one device: its arena on the host, its copies, and the slots of a step."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, evolve, field, frozen

from ...core.capture.programs.stage_programs import SavedStorage
from ...core.plan.memory_policy import Storage
from ...core.plan.plan import Plan
from ...core.policies.offload import HostSlots, host_slots
from ..programs.linked_stage import CapturedStage, LinkedStage
from .copies import Copy, Part
from .host_memory import HostMemory
from .moved_storages import MovedStorages

Stages = Sequence[Mapping[int, LinkedStage]]
"""For each microbatch a device's stages by index."""
Key = tuple[int, int]
"""Stage and microbatch."""


@frozen(eq=False)
class MovingCopy:
    """A copy that was issued, and what becomes of the storages when compute has waited for it.

    Args:
        copy: the copy.
        moved: the storages.
        outward: to the host, or back.
    """

    copy: Copy
    moved: MovedStorages
    outward: bool

    @property
    def started_ns(self) -> Any:
        """When it started, as a mark of the compute queue's clock."""
        return self.copy.started_ns

    @property
    def ended_ns(self) -> Any:
        """When it ended, likewise."""
        return self.copy.ended_ns

    def wait(self) -> None:
        """Make compute wait for the copy; then free the storages, or put them back."""
        self.copy.wait()
        if self.outward:
            self.moved.free()
        else:
            self.moved.restore()


@define(eq=False)
class BoundOffload:
    """The copies of a device in a step of certain shapes.

    Args:
        memory: where they go.
        slots: (stage, microbatch) → offset of each storage that leaves.
        staying: stage and name of storages that the plan offloads but that had to stay; added here, each with one
            warning.
    """

    _memory: HostMemory
    _slots: Mapping[Key, Sequence[int]]
    _staying: set[tuple[int, str]]
    _away: dict[Key, MovingCopy] = field(factory=dict)

    def out(self, run: CapturedStage, microbatch: int) -> MovingCopy:
        """Issue the copy of a microbatch's storages to the host."""
        moved = MovedStorages.take(run.saved(microbatch), run.offloaded, run.persistent)
        if moved.staying:
            self._warn_of_staying(run, moved)
        copy = self._memory.copies.out(self._parts(run, microbatch, moved))
        self._away[run.index, microbatch] = issued = MovingCopy(copy, moved, True)
        return issued

    def back(self, run: CapturedStage, microbatch: int) -> MovingCopy:
        """Allocate the storages of a microbatch again, and issue their copy from the host."""
        own = self._away.pop((run.index, microbatch))
        own.moved.allocate()
        copy = self._memory.copies.back(self._parts(run, microbatch, own.moved), own.copy)
        return MovingCopy(copy, own.moved, False)

    def _parts(self, run: CapturedStage, microbatch: int, moved: MovedStorages) -> list[Part]:
        offsets = self._slots[run.index, microbatch]
        return [Part(data, offsets[number]) for number, data in zip(moved.taken, moved.data, strict=True)]

    def _warn_of_staying(self, run: CapturedStage, moved: MovedStorages) -> None:
        for storage in (run.offloaded[number] for number in moved.staying):
            if (run.index, storage.name) not in self._staying:
                self._staying.add((run.index, storage.name))
                warnings.warn(
                    f"storage '{storage.name}' of stage {run.index} is not as captured: it has more than "
                    f"{storage.bytes} bytes, or shares its memory with what stays. It stays on the device, and a step "
                    "needs more memory than planned; remove it from memory.offload",
                    stacklevel=2,
                )


class DeviceOffload:
    """Offload of one device.

    Args:
        device: its number along the pipeline.
        memory: where its saved tensors go.
    """

    def __init__(self, device: int, memory: HostMemory) -> None:
        self._device, self.memory = device, memory
        self._staying: set[tuple[int, str]] = set()

    def bind(self, plan: Plan, runs: Stages) -> BoundOffload:
        """The copies of a step, with an arena that is large enough.

        Args:
            plan: for the step's microbatches.
            runs: for each microbatch this device's stages by index.

        Raises:
            RequestError: there is no space for the arena.
        """
        offloaded = [{index: run.offloaded for index, run in own.items()} for own in runs]
        slots = slots_of(plan, self._device, offloaded)
        self.memory.reserve(slots.bytes)
        return BoundOffload(self.memory, slots.offsets, self._staying)


def slots_of(plan: Plan, device: int, offloaded: Sequence[Mapping[int, Sequence[SavedStorage]]]) -> HostSlots:
    """The slots of a step in a device's arena.

    Args:
        plan: for the step's microbatches.
        device: its number along the pipeline.
        offloaded: for each microbatch what leaves of each of its stages. A slot is as large as the largest of them.
    """
    offload = []
    for each in plan.memory.offload:
        sizes: dict[int, int] = {}
        for own in offloaded:
            for number, storage in enumerate(own.get(each.stage, ())):
                sizes[number] = max(sizes.get(number, 0), storage.bytes)
        storages = tuple(Storage(str(number), size) for number, size in sizes.items())
        if plan.placement[each.stage] == device:
            offload.append(evolve(each, storages=storages))
    return host_slots(evolve(plan, memory=evolve(plan.memory, offload=tuple(offload))), device)
