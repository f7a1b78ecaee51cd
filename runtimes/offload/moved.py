"""The storages of one microbatch on their way: taken from the saved tensors, freed, and put back as views of new ones.

    saved tensors   [ a , a.t() , b ]        [ None , None , b ]        [ a' , a'.t() , b ]
                      └── take ──▶ out ──free──▶   allocate ──▶ back ──restore──┘

Nothing resizes a storage: a storage that somebody else still holds stays alive, with its values.
"""

from collections.abc import Sequence
from typing import Any

import torch
from attrs import define, frozen
from torch import Tensor

from ...core.capture.graph.storages import storage_of


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
    """

    saved: list[Any]
    data: list[Tensor]
    device: torch.device
    _storages: Sequence[_Storage] = ()

    @classmethod
    def take(cls, saved: list[Any], groups: Sequence[Sequence[int]], persistent: set[int]) -> "MovedStorages":
        """Take storages of the saved tensors.

        Args:
            saved: the saved tensors.
            groups: for each storage the positions of its views, as planned. What else is found to be a view of it
                leaves with it.
            persistent: storages (by identity) that live for the whole of training, which none of them may be.

        Raises:
            RuntimeError: a storage is one of these, or its views are of several storages.
        """
        keys = [storage_of(value) if isinstance(value, Tensor) else None for value in saved]
        views: dict[int, list[int]] = {}
        for place, key in enumerate(keys):
            if key is not None:
                views.setdefault(key, []).append(place)
        data, storages = [], []
        for group in groups:
            (key,) = {keys[place] for place in group} if len({keys[place] for place in group}) == 1 else (None,)
            if key is None or key in persistent:
                raise RuntimeError(
                    f"the saved tensors {list(group)} are not views of one storage of their own, as they were when the "
                    "stage was captured"
                )
            bytes_ = _bytes_of(saved[group[0]])
            data.append(bytes_)
            storages.append(_Storage(bytes_.nbytes, tuple(_View.of(place, saved[place]) for place in views[key])))
        device = data[0].device if data else torch.device("cpu")
        return cls(saved, data, device, storages)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each storage."""
        return [storage.size for storage in self._storages]

    def free(self) -> None:
        """Let go of the storages, which are on the host."""
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
