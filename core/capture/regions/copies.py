"""Copies of a module without data, one for each thread that runs it at the same time."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from attrs import define, field
from torch import Tensor, nn

from .replay import copy_on_meta


@define(eq=False)
class Copies:
    """Copies of a module on the meta device.

    A run puts its tensors into the copy, so no two threads may run the same one: devices that are threads profile all
    operators at the same time, and a module that is called twice may be in the stages of two of them.

    Args:
        template: a copy that is never run.
        foreign: identity of a tensor of the template that is not the module's → its replacement in copies.
    """

    template: nn.Module
    foreign: Mapping[int, Tensor]
    _free: list[nn.Module] = field(factory=list, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    @classmethod
    def of(cls, module: nn.Module, foreign: Mapping[int, Tensor]) -> "Copies":
        """Copies of a module as it is now.

        Args:
            module: the module.
            foreign: identity of a tensor that is not the module's → its replacement in copies.
        """
        return cls(copy_on_meta(module, foreign), {id(tensor): tensor for tensor in foreign.values()})

    @contextmanager
    def lent(self) -> Iterator[nn.Module]:
        """The context in which a copy is this thread's alone."""
        with self._lock:
            copy = self._free.pop() if self._free else copy_on_meta(self.template, self.foreign)
        try:
            yield copy
        finally:
            self._free.append(copy)
