"""Values for a step that runs on fake tensors, where its Python asks for some: it goes on with them."""

from typing import Any

import numpy
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from .raising import value_without_error


class PlaceholderValues(TorchFunctionMode):
    """Within, fake tensors are numpy arrays of one number where a step asks for an array, texts show the number that
    ``item()`` returns, and checks that raise an error pass.

    Args:
        number: in arrays; those of whole numbers, which may be indices, have 0 up to 1.

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
            if func is Tensor.__format__ and tensor.dim() == 0:
                return format(tensor.item(), args[1])
            if func is Tensor.__bool__ and (found := value_without_error(started=False)) is not None:
                return found
        return func(*args, **(kwargs or {}))
