"""Numbers the calls of torch functions in a run of a step's Python."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...tensor_metadata import METADATA_PROPERTIES

Place = tuple[int, int]
"""A computed tensor: the number of its call, and its position among the call's results."""


@frozen
class Slot:
    """A tensor among a call's results.

    Args:
        shape, dtype, requires_grad: of the tensor.
        stride: of the tensor; None for one without strides, as a sparse tensor.
        argument: index among the call's tensor arguments if the call returned one of them.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    dtype: torch.dtype
    requires_grad: bool
    argument: int | None

    @classmethod
    def of(cls, tensor: Tensor, argument: int | None = None) -> "Slot":
        """The slot of a tensor."""
        stride = tuple(tensor.stride()) if tensor.layout is torch.strided else None
        return cls(tuple(tensor.shape), stride, tensor.dtype, tensor.requires_grad, argument)

    def stand_in(self) -> Tensor:
        """A tensor without values that has the same metadata, except for its device."""
        made = torch.empty(self.shape, dtype=self.dtype, device="meta")
        if self.stride is not None and self.stride != made.stride():
            made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return made.requires_grad_(self.requires_grad)


class Calls(TorchFunctionMode, ABC):
    """Numbers the calls of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._inside = False
        self.held: tuple[Tensor, ...] = ()  # the state of the module that is called as one

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        if func in METADATA_PROPERTIES:
            return self.metadata(func, args)
        number, self.count = self.count, self.count + 1
        return self.call(number, func, lambda: func(*args, **kwargs), (args, kwargs))

    def whole(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call of a module that counts as one."""
        if self._inside:
            return forward(*args, **kwargs)
        number, self.count = self.count, self.count + 1
        self._inside, self.held = True, (*module.parameters(), *module.buffers())
        try:
            # Its forward has another name while it is captured, as the call of a region.
            return self.call(number, type(module).forward, lambda: forward(*args, **kwargs), (args, kwargs))
        finally:
            self._inside, self.held = False, ()

    def metadata(self, func: Any, args: Any) -> Any:
        """Read a property that is metadata; this does not count as a call."""
        return func(*args)

    @abstractmethod
    def call(self, number: int, func: Any, run: Callable[[], Any], given: Any) -> Any:
        """Handle a call.

        Args:
            number: of the call.
            func: the called function.
            run: calls it.
            given: its arguments.

        Returns:
            The result that the step gets.
        """


@contextmanager
def numbered(model: nn.Module, names: Sequence[str], calls: Calls) -> Iterator[None]:
    """The context of a run of the model's step whose calls are handled; calls of module regions count as one."""
    patched = []
    for name in names:
        module: Any = model.get_submodule(name)
        forward = module.forward
        patched.append((module, forward if "forward" in module.__dict__ else None))
        module.forward = lambda *a, _m=module, _f=forward, **k: calls.whole(_m, _f, *a, **k)
    try:
        with calls:
            yield
    finally:
        for module, own in patched:
            if own is None:
                del module.forward
            else:
                module.forward = own
