"""Runs the tail of a step: its Python runs again from the start, but calls before the tail compute nothing.

These calls return tensors that were computed elsewhere, or tensors without data if the tail does not read them. During
capture a `Locator` finds the tensors to compute elsewhere.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ...errors import RequestError
from ...tensor_metadata import METADATA_READS, name_of
from ..python.changes import INTERNAL
from ..values.capture_errors import NeedsValue, depends_on_value
from ..values.nesting import tensors_of
from .calls import Calls, Place, Slot
from .observer import Record


class Locator(Calls):
    """Finds, while a step is captured, the captured tensors that its tail reads.

    Args:
        places: of these tensors.

    Attributes:
        names: of the calls up to the one that needed a value, or of all.
        found: place → captured tensor.
    """

    def __init__(self, places: Sequence[Place] = ()) -> None:
        super().__init__()
        self.names: list[str] = []
        self.found: dict[Place, Tensor] = {}
        self._stopped = False
        self._places = set(places)
        self._calls = {number for number, _ in places}

    def call(self, number: int, func: Any, run: Callable[[], Any], given: Any) -> Any:
        if not self._stopped:
            self.names.append(name_of(func))
        try:
            result = run()
        except Exception as error:
            self._stopped = self._stopped or depends_on_value(error)
            if depends_on_value(error) and not isinstance(error, NeedsValue):
                raise NeedsValue(str(error)) from error
            raise
        if number in self._calls:
            for position, leaf in enumerate(pytree.tree_leaves(result)):
                if (number, position) in self._places:
                    self.found[number, position] = leaf
        return result


class Replay(Calls):
    """Runs the tail of a step.

    Args:
        record: results of the calls before it.
        received: the tensors that the tail reads, by place.
        line: the user's, for messages.
    """

    def __init__(self, record: Record, received: Mapping[Place, Tensor], line: str) -> None:
        super().__init__()
        self._record, self._received, self._line = record, received, line
        self._device = next((tensor.device for tensor in received.values()), torch.device("cpu"))

    def metadata(self, func: Any, args: Any) -> Any:
        found = func(*args)
        return self._device if isinstance(found, torch.device) and found.type == "meta" else found

    def call(self, number: int, func: Any, run: Callable[[], Any], given: Any) -> Any:
        if number >= self._record.until:
            self._refuse_stand_ins(func, given)
            return run()
        if self._record.names[number] != name_of(func):
            raise RequestError(
                f"{self._line}: the step calls {name_of(func)} here where it called {self._record.names[number]} for "
                "the example: up to the first line that needs a value it must do the same each time"
            )
        if number in self._record.reads or func in _MODES:
            return run()
        spec, slots = self._record.returned[number]
        tensors = tensors_of(given)
        leaves = [
            self._tensor((number, position), leaf, tensors) if isinstance(leaf, Slot) else leaf
            for position, leaf in enumerate(slots)
        ]
        return pytree.tree_unflatten(leaves, spec)

    def _tensor(self, place: Place, slot: Slot, arguments: Sequence[Tensor]) -> Tensor:
        """What a call before the tail returns in place of a tensor."""
        if slot.argument is not None:
            return arguments[slot.argument]
        received = self._received.get(place)
        return slot.stand_in() if received is None else received

    def _refuse_stand_ins(self, func: Any, given: Any) -> None:
        if func in METADATA_READS or not any(tensor.is_meta for tensor in tensors_of(given)):
            return
        raise RequestError(
            f"{self._line}: after this line the step reads a tensor in {name_of(func)} that it did not read for the "
            "example: compute it after this line, in the branch that reads it, or read it in all branches (add "
            "0 * tensor.sum() where it is not needed), or give an example batch for which it is read"
        )


_MODES = {torch._C._set_grad_enabled}
"""Calls that change how later ones run."""


def copy_on_meta(module: nn.Module, foreign: Mapping[int, Tensor]) -> nn.Module:
    """A copy of a module without data: its parameters and buffers are on the meta device.

    Its other tensors are not copied: the user may write into them between steps.

    Args:
        module: the module.
        foreign: identity of a tensor that is not the module's → its replacement in the copy.
    """
    memo: dict[int, Any] = dict(foreign)
    with _disable_current_modes():  # a step may be captured now; copies of fake tensors belong to that thread alone
        for tensor in (*module.parameters(), *module.buffers()):
            bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            memo[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare
    for inner in module.modules():
        own = [held for name, held in vars(inner).items() if name not in INTERNAL]
        for tensor in pytree.tree_leaves(own):
            if isinstance(tensor, Tensor):
                memo.setdefault(id(tensor), tensor)
    return copy.deepcopy(module, memo)


class Copies:
    """Copies of a module on the meta device.

    A run puts its tensors into the copy, so no two threads may run the same one: devices that are threads profile all
    operators at the same time, and a module that is called twice may be in the stages of two of them.

    Args:
        template: a copy that is never run.
    """

    def __init__(self, template: nn.Module) -> None:
        self.template, self._free = template, list[nn.Module]()

    @contextmanager
    def lent(self) -> Iterator[nn.Module]:
        """The context in which a copy is this thread's alone."""
        try:
            own = self._free.pop()
        except IndexError:
            own = copy_on_meta(self.template, {})
        try:
            yield own
        finally:
            self._free.append(own)
