"""Offload of one device: its arena on the host, its copies, and the slots of a step.

The storages of a microbatch are taken from the saved tensors, freed, and put back as views of new ones::

    saved tensors   [ a , a.t() , b ]        [ None , None , b ]        [ a' , a'.t() , b ]
                      └── take ──▶ out ──free──▶   allocate ──▶ back ──restore──┘

No storage is resized: one that other code still references stays alive, with its values.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from ...backends.streams import Streams, streams_of
from ...core.capture.programs.stage_programs import SavedStorage
from ...core.errors import warn_caller
from ...core.plan.memory_policy import Storage
from ...core.plan.plan import Plan
from ...core.policies.offload import HostSlots, host_slots
from ...core.tensor_metadata import storage_of
from ..devices.available_memory import lockable_bytes
from ..programs.stage_run import StageRun, Stages
from .copies import Copies, Copy, FileArena, MemoryArena, Part, StreamCopies, ThreadCopies
from .tier import OffloadTier


@frozen
class _View:
    """A saved tensor as a view of its storage, and its position among the saved tensors."""

    place: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugate: bool
    negative: bool

    @classmethod
    def of(cls, place: int, tensor: Tensor) -> "_View":
        return cls(
            place, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.is_conj(),
            tensor.is_neg(),
        )  # fmt: skip

    def on(self, data: Tensor) -> Tensor:
        """The view, of other bytes."""
        view = torch.empty(0, dtype=self.dtype, device=data.device)
        view = view.set_(data.untyped_storage(), self.offset, self.size, self.stride)
        view = torch._conj(view) if self.conjugate else view
        return torch._neg_view(view) if self.negative else view


@frozen
class _Storage:
    size: int
    views: tuple[_View, ...]


@define(eq=False)
class MovedStorages:
    """Storages of one microbatch between OFFLOAD and the reader of its RELOAD.

    Args:
        saved: the saved tensors; changed in place.
        data: the storages' bytes, while they are on the device or a copy writes them.

    Attributes:
        taken: for each its number among the planned storages.
        staying: numbers of planned storages that stay on the device.
    """

    saved: list[Any]
    data: list[Tensor]
    device: torch.device
    taken: Sequence[int] = ()
    staying: Sequence[int] = ()
    _storages: Sequence[_Storage] = ()

    @classmethod
    def take(cls, saved: list[Any], planned: Sequence[SavedStorage], persistent: set[int]) -> "MovedStorages":
        """Take storages of the saved tensors.

        A storage that is not as it was captured stays on the device: operators may allocate more than their fake
        tensors have, or return a view where these are none.

        Args:
            planned: the storages that leave, as captured. What else is found to be a view of one leaves with it.
            persistent: storages (by identity) that live for the whole of training, which none of them may be.
        """
        keys = [storage_of(value) if isinstance(value, Tensor) else None for value in saved]
        views: dict[int, list[int]] = {}
        for place, key in enumerate(keys):
            if key is not None:
                views.setdefault(key, []).append(place)
        taken: dict[int, tuple[int, Tensor]] = {}  # storage → number of the planned one, bytes
        staying = []
        for number, storage in enumerate(planned):
            key = keys[storage.places[0]]
            one = all(keys[place] == key for place in storage.places)
            if key in taken and one:
                continue  # it leaves with another one, whose memory it shares
            data = _bytes_of(saved[storage.places[0]]) if key is not None else None
            if key is None or data is None or not one or key in persistent or data.nbytes > storage.bytes:
                staying.append(number)
            else:
                taken[key] = number, data
        storages = [
            _Storage(data.nbytes, tuple(_View.of(place, saved[place]) for place in views[key]))
            for key, (_, data) in taken.items()
        ]
        parts = [data for _, data in taken.values()]
        device = parts[0].device if parts else torch.device("cpu")
        return cls(saved, parts, device, [number for number, _ in taken.values()], staying, storages)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each storage."""
        return [storage.size for storage in self._storages]

    def free(self) -> None:
        """Free the storages, which are on the host."""
        for storage in self._storages:
            for view in storage.views:
                self.saved[view.place] = None
        self.data = []

    def allocate(self) -> None:
        """Allocate new ones."""
        self.data = [torch.empty(storage.size, dtype=torch.uint8, device=self.device) for storage in self._storages]

    def restore(self) -> None:
        """Put views of the new ones in the places of the saved tensors."""
        for storage, data in zip(self._storages, self.data, strict=True):
            for view in storage.views:
                self.saved[view.place] = view.on(data)
        self.data = []


def _bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's whole storage."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


Key = tuple[int, int]
"""Stage and microbatch."""


@define(eq=False)
class BoundOffload:
    """The copies of a device in a step of certain shapes.

    Args:
        slots: (stage, microbatch) → offset of each storage that leaves.
        staying: stage and name of storages that the plan offloads but that had to stay; added here, each with one
            warning.
    """

    _offload: "DeviceOffload"
    _slots: Mapping[Key, Sequence[int]]
    _staying: set[tuple[int, str]]
    _away: dict[Key, tuple[Copy, MovedStorages]] = field(factory=dict)

    def out(self, run: StageRun, microbatch: int) -> tuple[Copy, MovedStorages]:
        """Issue the copy of a microbatch's storages to the host; they are freed when compute has waited for it."""
        moved = MovedStorages.take(run.saved(microbatch), run.offloaded, run.persistent)
        if moved.staying:
            self._warn_of_staying(run, moved)
        copy = self._offload.copies.out(self._parts(run, microbatch, moved), moved.free)
        self._away[run.index, microbatch] = issued = copy, moved
        return issued

    def back(self, run: StageRun, microbatch: int) -> tuple[Copy, MovedStorages]:
        """Allocate the storages of a microbatch again, and issue their copy from the host; they take the places of the
        saved tensors when compute has waited for it."""
        own, moved = self._away.pop((run.index, microbatch))
        moved.allocate()
        return self._offload.copies.back(self._parts(run, microbatch, moved), own, moved.restore), moved

    def _parts(self, run: StageRun, microbatch: int, moved: MovedStorages) -> list[Part]:
        offsets = self._slots[run.index, microbatch]
        return [Part(data, offsets[number]) for number, data in zip(moved.taken, moved.data, strict=True)]

    def _warn_of_staying(self, run: StageRun, moved: MovedStorages) -> None:
        for storage in (run.offloaded[number] for number in moved.staying):
            if (run.index, storage.name) not in self._staying:
                self._staying.add((run.index, storage.name))
                warn_caller(
                    f"storage '{storage.name}' of stage {run.index} is not as captured: it has more than "
                    f"{storage.bytes} bytes, or shares its memory with what stays. It stays on the device, and a step "
                    "needs more memory than planned; remove it from memory.offload",
                )


class DeviceOffload:
    """Offload of one device to its arena on the host.

    Args:
        separate: whether each direction of the copies has a queue of its own.
    """

    def __init__(self, tier: OffloadTier, device: torch.device, number: int, separate: bool = False) -> None:
        self._tier, self._device, self._number, self._separate = tier, device, number, separate
        self.bytes = 0
        self._copies: Copies | None = None
        self._unpin: Callable[[], object] | None = None
        self._arena: MemoryArena | FileArena | None = None
        self._staying: set[tuple[int, str]] = set()

    def bind(self, plan: Plan, runs: Stages) -> BoundOffload:
        """The copies of a step, with an arena that is large enough.

        Raises:
            RequestError: there is no space for the arena.
        """
        offloaded = [{index: run.offloaded for index, run in own.items()} for own in runs]
        slots = slots_of(plan, self._number, offloaded)
        self.reserve(slots.bytes)
        return BoundOffload(self, slots.offsets, self._staying)

    @property
    def copies(self) -> Copies:
        """The copies; there are some once an arena is reserved."""
        assert self._copies is not None
        return self._copies

    def reserve(self, size: int) -> None:
        """Have an arena of at least this many bytes; between steps.

        Raises:
            RequestError: there is no space for it.
        """
        if self._copies is not None and size <= self.bytes:
            return
        self.close()
        streams = streams_of(self._device)
        self._copies = self._threaded(size) if streams is None else self._streamed(size, streams)
        self.bytes = size

    def close(self) -> None:
        """Free the arena."""
        if self._copies is not None:
            self._copies.close()
        if self._arena is not None:
            self._arena.close()
        if self._unpin is not None:
            self._unpin()
        self._copies = self._unpin = self._arena = None
        self.bytes = 0

    def _threaded(self, size: int) -> Copies:
        folder = self._tier.folder
        self._arena = MemoryArena(size) if folder is None else FileArena(folder, size)
        name = f"panpipe copies of device {self._number}"
        return ThreadCopies(self._arena, name, separate=self._separate)

    def _streamed(self, size: int, streams: Streams) -> Copies:
        arena = torch.empty(size, dtype=torch.uint8)
        if self._device.type == "cuda":
            if pin(arena, self._device):
                self._unpin = finalizer = weakref.finalize(self, unpin, arena, self._device)
                finalizer.atexit = False  # the driver is gone then
            else:
                warn_caller(self._not_pinned(arena))
        return StreamCopies(arena, streams, self._device, self._number, self._separate)

    def _not_pinned(self, arena: Tensor) -> str:
        """The warning that copies use pageable memory, with the limit that may be the reason."""
        left = lockable_bytes()
        limit = "" if left is None or left >= arena.nbytes else f" (ulimit -l leaves {left} bytes)"
        return (
            f"the host pins no {arena.nbytes} bytes for the saved tensors of device {self._number}{limit}: copies use "
            "pageable memory, which is slower, and the host waits for them; raise ulimit -l, or offload less"
        )


def pin(memory: Tensor, device: torch.device) -> bool:
    """Page-lock exactly this memory, if the driver does; torch's own allocator of pinned memory rounds up to powers of
    two. ``device`` is the GPU that copies it."""
    if not memory.nbytes:
        return False
    runtime: Any = torch.cuda.cudart()
    done = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0
    if not done:  # CUDA keeps the error, and the next launch of a kernel raises it: this one
        with suppress(RuntimeError):
            torch.ones(1, device=device)
    return done


def unpin(memory: Tensor, device: torch.device) -> None:
    """Undo `pin`, when no copy uses the memory any more."""
    torch.cuda.synchronize(device)
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(memory.data_ptr())


def slots_of(plan: Plan, device: int, offloaded: Sequence[Mapping[int, Sequence[SavedStorage]]]) -> HostSlots:
    """The slots of a step in a device's arena.

    Args:
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
