"""Values that follow from numbers and sizes alone, such as whether a mask that the step makes is a causal one.

A captured step has no values. But what its Python computes from numbers, such as a mask of a sequence's length, has the
same value in each run with the same sizes: where Python reads it, the calls that made it run again with real tensors.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from unittest import mock

import torch
from attrs import define, field
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.fx.experimental.symbolic_shapes import guarding_hint_or_throw
from torch.nn.modules import transformer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ...tensor_metadata import memory_of
from .capture_errors import NeedsValue
from .nesting import tensors_of

_Call = tuple[Callable[..., Any], Any, Any, Any]
"""A function of torch, its arguments, and its result."""
Number = Callable[[Any], Any]
"""Gives the number for a symbolic one."""


@define(eq=False)
class KnownValues:
    """The calls of a run of the step whose tensors depend on no parameter, batch or random number.

    Attributes:
        reads: for each value that Python read and that depends on symbolic sizes: whether other sizes give the same.
    """

    reads: list[Callable[[Number], bool]] = field(factory=list)
    _calls: list[_Call] = field(factory=list)

    def note(self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """Keep a call."""
        self._calls.append((func, args, kwargs, result))

    def read(self, func: Callable[..., Any], args: Any) -> Any:
        """What a function that reads values returns.

        Raises:
            Exception: the value depends on more than numbers and sizes, or cannot be computed on the host.
        """
        calls, symbols = tuple(self._calls), list[Any]()

        def hint(number: Any) -> Any:
            symbols.append(number)
            return guarding_hint_or_throw(number)

        found = _computed(calls, func, args, hint)
        if symbols and func is Tensor.item:
            raise NeedsValue("a number that depends on sizes is computed in each run")

        def same(number: Number) -> bool:
            with suppress(Exception):  # with these sizes a call fails
                again = _computed(calls, func, args, number)
                return bool(torch.equal(torch.as_tensor(again), torch.as_tensor(found)))
            return False

        if symbols:
            self.reads.append(same)
        return found


def _computed(calls: Sequence[_Call], func: Callable[..., Any], args: Any, number: Number) -> Any:
    """What a function returns after some calls, all with real tensors on the host."""
    real: dict[int, Tensor] = {}

    def argument(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return real[id(leaf)]
        if isinstance(leaf, tuple):  # a torch.Size
            return tuple(map(argument, leaf))
        if isinstance(leaf, slice):
            return slice(*map(argument, (leaf.start, leaf.stop, leaf.step)))
        if isinstance(leaf, SymInt | SymFloat | SymBool):
            return number(leaf)
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    arguments = partial(pytree.tree_map, argument)
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        for called, given, options, result in calls:
            if all(id(tensor) in real for tensor in tensors_of((given, options))):  # the values of a buffer are unknown
                made = called(
                    *arguments(given), **{**arguments(options), **dict.fromkeys({"device"} & {*options}, "cpu")}
                )
                real.update(zip(map(id, tensors_of(result)), tensors_of(made), strict=True))
            elif called.__name__.endswith("_") or "out" in options:  # it wrote values that are unknown
                memories = {memory_of(real[id(t)]) for t in tensors_of((given, options)) if id(t) in real}
                real = {key: tensor for key, tensor in real.items() if memory_of(tensor) not in memories}
        return func(*arguments(args))


@contextmanager
def unknown_masks_taken() -> Iterator[None]:
    """Within this context a transformer of torch takes a mask of unknown values as it is.

    With a causal one eager PyTorch lets the kernel make it, which is a hint for speed alone (``is_causal`` of
    `torch.nn.TransformerEncoder`).
    """
    detect: Callable[..., bool] = transformer._detect_is_causal_mask

    def detected(*args: Any, **options: Any) -> bool:
        try:
            return detect(*args, **options)
        except NeedsValue:
            return False

    with mock.patch.object(transformer, "_detect_is_causal_mask", detected):
        yield
