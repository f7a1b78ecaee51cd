"""Placeholder values for a step that runs on fake tensors, so that its Python continues when it needs a value."""

import ctypes
import mmap
from functools import cache
from typing import Any

import numpy
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from .raising_branches import value_without_error

_LARGEST = 1 << 28
"""Bytes of the largest storage with a placeholder address."""


class PlaceholderValues(TorchFunctionMode):
    """A mode in which ``numpy()`` of a fake tensor returns an array of one number, texts contain the number that
    ``item()`` returns, ``data_ptr()`` is the address of zeros, and checks that raise an error pass.

    Args:
        number: value of the arrays; whole numbers, which may be indices, are 1 smaller, but at least 0.

    Attributes:
        gave_number: whether the step asked for an array.
    """

    def __init__(self, number: float = 0.0) -> None:
        super().__init__()
        self._number = number
        self.gave_number = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], FakeTensor):
            tensor = args[0]
            if func in (Tensor.numpy, Tensor.__array__):
                self.gave_number = True
                number = self._number if tensor.is_floating_point() else max(int(self._number) - 1, 0)
                return numpy.full(tuple(tensor.shape), number).astype(str(tensor.dtype).removeprefix("torch."))
            if func is Tensor.data_ptr:
                return _address_of_zeros(tensor)
            if func is Tensor.__format__ and tensor.dim() == 0:
                return format(tensor.item(), args[1])
            if func is Tensor.__bool__ and (found := value_without_error()) is not None:
                return found
        return func(*args, **(kwargs or {}))


def _address_of_zeros(tensor: Tensor) -> int:
    """The address of zeros for a fake tensor, the same in every run.

    Foreign code may read there. At the address 0, which torch returns, it would crash, or find other bytes in each run:
    ``ctypes.string_at`` returns uninitialised bytes.

    Raises:
        RuntimeError: the tensor is too large.
    """
    size = tensor.untyped_storage().nbytes()
    if size > _LARGEST:
        raise RuntimeError(
            f"a fake tensor of {size} bytes has no address: the largest one with an address has {_LARGEST}"
        )
    return ctypes.addressof(ctypes.c_char.from_buffer(_zeros())) + int(tensor.storage_offset()) * tensor.itemsize


@cache
def _zeros() -> mmap.mmap:
    return mmap.mmap(-1, _LARGEST)  # takes no memory until it is read
