"""Runs of the step's Python with real tensors: to observe what regions return, and to run the tail of a step.

A run is a sequence of calls of torch functions. An `Observer` records what each call of a whole run returned; the call
of a module region counts as one. A `Replay` runs the Python again without computing anything before the tail: calls
return tensors that were computed elsewhere, or tensors without data if the tail does not read them.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ...errors import RequestError
from ..graph.alignment import aligned
from ..graph.storages import state_of
from ..values.values import NeedsValue, depends_on_value, reads_values

Place = tuple[int, int]
"""A computed tensor: the number of its call, and its position among the call's results."""


@frozen
class _Slot:
    """A tensor among a call's results: its metadata, and the index of the argument if the call returned that."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    argument: int | None

    def stand_in(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


class _Calls(TorchFunctionMode, ABC):
    """Numbers the calls of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._inside = False
        self.held: tuple[Tensor, ...] = ()  # by the module that is called as one

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        if _property(func) not in _TENSOR_PROPERTIES:
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
            return self.call(number, forward, lambda: forward(*args, **kwargs), (args, kwargs))
        finally:
            self._inside, self.held = False, ()

    def metadata(self, func: Any, args: Any) -> Any:
        """Read a tensor's metadata; this does not count as a call."""
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
def numbered(model: nn.Module, names: Sequence[str], calls: _Calls) -> Iterator[None]:
    """The context of a run of the model's step whose calls are handled; calls of module regions count as one."""
    patched = []
    for name in names:
        module: Any = model.get_submodule(name)
        forward = module.forward
        module.forward = lambda *a, _m=module, _f=forward, **k: calls.whole(_m, _f, *a, **k)
        patched.append((module, forward if "forward" in module.__dict__ else None))
    try:
        with calls:
            yield
    finally:
        for module, own in patched:
            if own is None:
                del module.forward
            else:
                module.forward = own


@define(eq=False)
class Record:
    """The results of the calls before the tail.

    Args:
        names: of each call's function.
        returned: for each call, the nesting of its result, and its leaves; a `_Slot` for a tensor.
        until: number of the first call of the tail.
        reads: numbers of earlier calls that read values of captured tensors.
    """

    names: list[str] = field(factory=list)
    returned: list[tuple[pytree.TreeSpec, list[Any]]] = field(factory=list)
    until: int = -1
    reads: set[int] = field(factory=set)


@frozen
class _Seen:
    """An observed call: its tensor arguments, those that it wrote, draws before it, and whether it reads values."""

    given: tuple[Tensor, ...]
    written: tuple[Tensor, ...]
    draws: int
    reads: bool


@define(eq=False)
class Tail:
    """The reads and writes of the tail of a step.

    Args:
        record: results of the calls before it.
        needed: place → tensor, for tensors computed before the tail that it reads.
        touched: other tensors that it reads, such as parameters, by identity.
        before: identities of the tensors that are read before it.
        written: identities of tensors that it writes in place.
        draws: number of random draws before it.
    """

    record: Record
    needed: dict[Place, Tensor]
    touched: dict[int, Tensor]
    before: set[int]
    written: set[int]
    draws: int


class Observer(_Calls):
    """Records the reads and results of each call of a step.

    Args:
        drawn: returns the number of random draws so far.
    """

    def __init__(self, drawn: Callable[[], int]) -> None:
        super().__init__()
        self._record = Record()
        self._drawn = drawn
        self._made: dict[int, Place] = {}
        self._seen: list[_Seen] = []
        self._alive: list[Any] = []

    def call(self, number: int, func: Any, run: Callable[[], Any], given: Any) -> Any:
        leaves = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
        given_or_held = (*leaves, *self.held)
        states = [state_of(tensor) for tensor in given_or_held]
        draws, result = self._drawn(), run()
        written = tuple(t for t, before in zip(given_or_held, states, strict=True) if state_of(t) != before)
        self._seen.append(_Seen(given_or_held, written, draws, reads_values(func)))
        flat, spec = pytree.tree_flatten(result)
        places = {id(tensor): i for i, tensor in reversed(list(enumerate(leaves)))}
        slots: list[Any] = []
        for position, leaf in enumerate(flat):
            if not isinstance(leaf, Tensor):
                slots.append(leaf)
                continue
            slots.append(_Slot(tuple(leaf.shape), leaf.dtype, places.get(id(leaf))))
            if id(leaf) not in places:
                self._made.setdefault(id(leaf), (number, position))
        self._record.names.append(_name(func))
        self._record.returned.append((spec, slots))
        self._alive.append(result)
        return result

    def tail(self, names: Sequence[str], result: Any) -> tuple[Tail, dict[int, int]]:
        """The tail that starts at the last of some calls.

        Args:
            names: of the calls up to there during capture, when libraries may call other functions.
            result: of the step; the tail returns the parts of it that were computed before.

        Returns:
            The tail, and the number of a call in this run → its number during capture.
        """
        number = dict(aligned(self._record.names, names))
        # The last call itself may exist only during capture; then the tail starts after the call before it.
        before = max((here for here, there in number.items() if there < len(names) - 1), default=-1)
        until = next((here for here, there in number.items() if there == len(names) - 1), before + 1)
        before_tail = {id(tensor) for seen in self._seen[:until] for tensor in seen.given}
        tail = Tail(evolve(self._record, until=until), {}, {}, before_tail, set(), 0)
        # The tail may have no call at all, only Python.
        tail.draws = self._seen[until].draws if until < len(self._seen) else self._drawn()
        for here, seen in enumerate(self._seen):
            places = [self._made.get(id(tensor)) for tensor in seen.given]
            if here >= until:
                tail.written |= {id(tensor) for tensor in seen.written}
            elif seen.reads and all(place is None or place[0] in number for place in places):
                tail.record.reads.add(here)  # such as a number to print; the others only decide what is computed
            else:
                continue
            for tensor, place in zip(seen.given, places, strict=True):
                if place is None:
                    tail.touched[id(tensor)] = tensor
                elif place[0] < until:
                    tail.needed[place] = tensor
        for tensor in pytree.tree_leaves(result):
            place = self._made.get(id(tensor))
            if place is not None and place[0] < until:
                tail.needed[place] = tensor
        return tail, number


class Locator(_Calls):
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
            self.names.append(_name(func))
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


class Replay(_Calls):
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
        if self._record.names[number] != _name(func):
            raise RequestError(
                f"{self._line}: the step calls {_name(func)} here where it called {self._record.names[number]} for the "
                "example: up to the first line that needs a value it must do the same each time"
            )
        if number in self._record.reads or func in _MODES:
            return run()
        spec, slots = self._record.returned[number]
        tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
        leaves = [
            leaf
            if not isinstance(leaf, _Slot)
            else tensors[leaf.argument]
            if leaf.argument is not None
            else self._received.get((number, position), None)
            if (number, position) in self._received
            else leaf.stand_in()
            for position, leaf in enumerate(slots)
        ]
        return pytree.tree_unflatten(leaves, spec)

    def _refuse_stand_ins(self, func: Any, given: Any) -> None:
        if func in _HARMLESS or not any(isinstance(t, Tensor) and t.is_meta for t in pytree.tree_leaves(given)):
            return
        raise RequestError(
            f"{self._line}: after this line the step reads a tensor in {_name(func)} that it did not read for the "
            "example: give an example batch for which it reads all tensors that it may read"
        )


_MODES = {torch._C._set_grad_enabled}
"""Calls that change how later ones run."""

_HARMLESS = {Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point, Tensor.__len__}
"""Calls that need no data."""

_TENSOR_PROPERTIES = {None, "T", "mT", "H", "mH", "real", "imag", "data", "grad"}
"""Properties whose values are tensors, and None for a function that is not a property; all others are metadata."""


def _property(func: Any) -> str | None:
    """Name of the property that a function reads; None if it is not the getter of one."""
    return func.__self__.__name__ if getattr(func, "__name__", "") == "__get__" else None


def _name(func: Any) -> str:
    return getattr(func, "__name__", type(func).__name__)


def skeleton(module: nn.Module, foreign: Mapping[int, Tensor]) -> nn.Module:
    """A copy of a module without data: its parameters and buffers are on the meta device.

    Args:
        module: the module.
        foreign: identity of a tensor that is not the module's → its replacement in the copy.
    """
    memo: dict[int, Any] = dict(foreign)
    for tensor in (*module.parameters(), *module.buffers()):
        bare = tensor.detach().to("meta")
        memo[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare
    return copy.deepcopy(module, memo)
