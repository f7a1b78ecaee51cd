"""The offloaded storages of one microbatch: taken from the saved tensors, freed, and put back as views of new ones.

    saved tensors   [ a , a.t() , b ]        [ None , None , b ]        [ a' , a'.t() , b ]
                      └── take ──▶ out ──free──▶   allocate ──▶ back ──restore──┘

No storage is resized: one that other code still references stays alive, with its values.
"""

from collections.abc import Sequence
from typing import Any

import torch
from attrs import define, frozen
from torch import Tensor

from ...core.capture.programs.stage_programs import SavedStorage
from ...core.tensor_metadata import storage_of


@frozen
class _View:
    """A saved tensor as a view of its storage.

    Args:
        place: its position among the saved tensors.
        dtype, size, stride, offset: of the view; the offset in elements.
        conjugate, negative: its bits of these names.
    """

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
        device: where they are.
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
            saved: the saved tensors.
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
