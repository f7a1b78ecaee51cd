"""The tail of a step: everything from the first line outside of all modules that needs a tensor's value.

The calls of torch functions in a run of the step's Python are numbered, and a `Recorder` records a run with real
tensors, and one during capture. When the tail runs, the step's Python runs again from the start, but calls before the
tail compute nothing: they return tensors that were computed elsewhere, or tensors without data if the tail does not
read them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ...errors import PanpipeError, RequestError
from ...tensor_metadata import METADATA_PROPERTIES, METADATA_READS, memory_of, name_of, state_of
from ..graph.nodes import aligned
from ..values.capture_errors import NeedsValue, depends_on_value
from ..values.nesting import Nesting, extract_tensors, numbers_as_tensors, tensors_of
from ..values.value_watch import reads_values
from .regions import (
    Copies,
    Region,
    TensorSpec,
    call_region,
    copy_on_meta,
    forwards_replaced,
    may_be_written,
    trained,
)

Place = tuple[int, int]
"""A computed tensor: the number of its call, and its position among the call's results."""


_UNCOUNTED = METADATA_PROPERTIES | {Tensor.dim, Tensor.ndimension}
"""Reads of metadata that are no calls. The number of dimensions is among them: the layers of a transformer read it
where their fast path is enabled, which it is not while an evaluation is captured."""


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
        if func in _UNCOUNTED:
            return self.metadata(func, args)
        number, self.count = self.count, self.count + 1
        return self.call(number, func, lambda: func(*args, **kwargs), (args, kwargs))

    def whole(self, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
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
        """Read metadata; this does not count as a call."""
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
    with forwards_replaced(model, names, lambda _, module: partial(calls.whole, module, module.forward)), calls:
        yield


@frozen
class _Called:
    """A recorded call.

    Args:
        given: its tensor arguments.
        reads: these, and the parameters and buffers of a module that is called as one.
        leaves, nesting: its result.
        written: tensors among ``reads`` that it wrote.
        draws: number of random draws before it.
        needs_value: whether it converts a tensor to a Python value.
    """

    given: Sequence[Tensor]
    reads: Sequence[Tensor]
    leaves: list[Any]
    nesting: pytree.TreeSpec
    written: Sequence[Tensor]
    draws: int
    needs_value: bool


class Recorder(Calls):
    """Records the calls of a run.

    Args:
        drawn: returns the number of random draws so far, in a run with real tensors; None during capture.

    Attributes:
        names: of the calls up to the one that needed a value, or of all.
        calls: those that returned.
    """

    def __init__(self, drawn: Callable[[], int] | None = None) -> None:
        super().__init__()
        self.names: list[str] = []
        self.calls: dict[int, _Called] = {}
        self._drawn, self._stopped = drawn, False

    def call(self, number: int, func: Any, run: Callable[[], Any], given: Any) -> Any:
        if not self._stopped:
            self.names.append(name_of(func))
        tensors = tensors_of(given)
        reads = (*tensors, *self.held)
        states = [] if self._drawn is None else [state_of(tensor) for tensor in reads]
        draws = 0 if self._drawn is None else self._drawn()
        try:
            result = run()
        except Exception as error:
            self._stopped = self._stopped or depends_on_value(error)
            if depends_on_value(error) and not isinstance(error, NeedsValue | PanpipeError):
                raise NeedsValue(str(error)) from error
            raise
        written = [tensor for tensor, state in zip(reads, states, strict=False) if state_of(tensor) != state]
        self.calls[number] = _Called(
            tensors, reads, *pytree.tree_flatten(result), written, draws, reads_values(func)
        )  # fmt: skip
        return result

    def at(self, place: Place) -> Any:
        """What is at a place; None if nothing is."""
        call = self.calls.get(place[0])
        return call.leaves[place[1]] if call is not None and place[1] < len(call.leaves) else None


@frozen
class _Argument:
    """In place of a result of a call: the tensor argument with this number."""

    number: int


def _without_values(call: _Called) -> tuple[list[Any], pytree.TreeSpec]:
    """A call's result with tensors on meta, and arguments that it returned by number."""
    number = {id(tensor): i for i, tensor in reversed(list(enumerate(call.given)))}

    def bare(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in number:
            return _Argument(number[id(leaf)])
        if leaf.layout is not torch.strided:
            return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta").requires_grad_(leaf.requires_grad)
        made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
        return made.requires_grad_(leaf.requires_grad)

    return [bare(leaf) for leaf in call.leaves], call.nesting


@frozen(eq=False)
class TailRegion:
    """The tail of a step.

    Args:
        line: its first line.
        names: of the calls before it.
        returned: what these return, without values.
        read_before: numbers of those that read values of captured tensors: they run again.
        places: tensors that it reads: place in the observed run, and place in the capture.
        state: names of the parameters and buffers that it reads or may read.
        written: names of the buffers that it writes.
        result: the nesting of the step's result.
        made: the result's tensors and numbers, the loss first, and then the buffers that it wrote.
        draws: number of random draws.
        copied: places in the observed run of the tensors with a gradient that it writes in place.
    """

    line: str
    names: tuple[str, ...]
    returned: tuple[tuple[list[Any], pytree.TreeSpec], ...]
    read_before: frozenset[int]
    places: tuple[tuple[Place, Place], ...]
    state: tuple[str, ...]
    written: tuple[str, ...]
    result: Nesting
    made: tuple[TensorSpec, ...]
    draws: int
    copied: frozenset[Place] = frozenset()

    @classmethod
    def observed(
        cls,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        recorder: Recorder,
        names: Sequence[str],
        result: Any,
        drawn: int,
        line: str,
    ) -> "TailRegion":
        """The tail of a step, from a run with real tensors.

        Args:
            parameters, buffers: of the model at the end of the run.
            recorder: of the run.
            names: of the calls up to the tail during capture, when libraries may call other functions.
            result: of the step; the tail returns the parts of it that were computed before.
            drawn: number of random draws of the whole step.
            line: the user's first line of the tail.

        Raises:
            RequestError: the start of the tail, or a tensor that it reads, is not found in the run.
        """
        number, calls = dict(aligned(recorder.names, names)), recorder.calls
        # The last call itself may exist only during capture; then the tail starts after the call before it.
        before = max((here for here, there in number.items() if there < len(names) - 1), default=-1)
        until = next((here for here, there in number.items() if there == len(names) - 1), before + 1)
        made: dict[int, Place] = {}
        for here, call in calls.items():
            given = {id(tensor) for tensor in call.given}
            for position, leaf in enumerate(call.leaves):
                if isinstance(leaf, Tensor) and id(leaf) not in given:
                    made.setdefault(id(leaf), (here, position))
        needed, touched, changed, read_before = dict[Place, Tensor](), set[int](), set[int](), set[int]()
        for here, call in calls.items():
            places = [made.get(id(tensor)) for tensor in call.reads]
            if here >= until:
                changed.update(map(id, call.written))
            elif call.needs_value and all(place is None or place[0] in number for place in places):
                read_before.add(here)  # such as a number to print; the others only decide what is computed
            else:
                continue
            needed.update({p: t for p, t in zip(places, call.reads, strict=True) if p is not None and p[0] < until})
            touched.update(id(t) for p, t in zip(places, call.reads, strict=True) if p is None)
        for tensor in pytree.tree_leaves(result):
            place = made.get(id(tensor))
            if place is not None and place[0] < until:
                needed[place] = tensor
        if any(here not in number for here, _ in needed):
            raise RequestError(
                f"{line}: this line needs a value, and the step calls other operators when it is captured than when "
                "it runs; move the line and what depends on it into a module"
            )
        memory = {memory_of(t): here for here, call in calls.items() if here >= until for t in call.written}
        for tensor in needed.values():
            if tensor.requires_grad and id(tensor) not in changed and memory_of(tensor) in memory:
                raise RequestError(
                    f"{line}: after this line {recorder.names[memory[memory_of(tensor)]]} writes, by .data, .detach() "
                    "or a view, into a tensor that the step computed before it: what the backward of earlier operators "
                    "reads would depend on the plan; use a function that returns a new tensor, such as masked_fill"
                )
        earlier = {id(tensor) for here, call in calls.items() if here < until for tensor in call.reads}
        earlier.update(tensor for tensor, place in made.items() if place[0] < until)
        # Another run of the tail may read what this run did not, such as a layer that is skipped at random. A buffer
        # that was assigned before the tail is a result of a call.
        state = tuple(
            n for n, t in (*parameters.items(), *buffers.items()) if id(t) in touched or id(t) not in earlier
        )  # fmt: skip
        written = tuple(n for n in state if n in buffers and (may_be_written(buffers[n]) or id(buffers[n]) in changed))
        tensors, nesting = extract_tensors(numbers_as_tensors(result))
        # The tail may have no call at all, only Python.
        draws = drawn - calls[until].draws if until in calls else 0
        return cls(
            line,
            tuple(recorder.names[:until]),
            tuple(_without_values(calls[here]) for here in range(until)),
            frozenset(read_before),
            tuple((here, (number[here[0]], here[1])) for here in needed),
            state,
            written,
            nesting,
            tuple(map(TensorSpec.like, (*tensors, *(buffers[n] for n in written)))),
            draws,
            frozenset(place for place, t in needed.items() if t.requires_grad and id(t) in changed),
        )

    def call(
        self,
        model: nn.Module,
        step: Callable[..., Any],
        regions: Sequence[str],
        captured: nn.Module,
        batch: Any,
        recorder: Recorder,
    ) -> Any:
        """Call the tail as a region during capture; return the step's result.

        Args:
            model: the user's.
            step: the user's.
            regions: names of the modules that are regions themselves.
            captured: the model, with captured tensors.
            batch: likewise.
            recorder: of the captured calls before the tail.

        Raises:
            RequestError: one of the tensors that it reads is not there.
        """
        found = [recorder.at(there) for _, there in self.places]
        if not all(isinstance(tensor, Tensor) for tensor in found):
            raise RequestError(
                f"{self.line}: this line needs a value, and what it reads cannot be found again while the step is "
                "captured; move the line and what depends on it into a module"
            )
        copies, count = Copies(copy_on_meta(model, {})), len(self.places)
        leaves, given = extract_tensors(batch)

        def run(values: list[Tensor]) -> list[Tensor]:
            received = {
                here: tensor.clone() if here in self.copied else tensor
                for (here, _), tensor in zip(self.places, values, strict=False)
            }
            state = dict(zip(self.state, values[count + len(leaves) :], strict=True))
            with (
                copies.running(f"{self.line}: the step", state, self.written) as bare,
                numbered(bare, regions, Replay(self, received)),
            ):
                result = step(bare, given.filled(values[count:]))
            return [*tensors_of(numbers_as_tensors(result)), *(state[key] for key in self.written)]

        own = {**dict(captured.named_parameters()), **dict(captured.named_buffers())}
        reads = [*found, *leaves, *(own[name] for name in self.state)]
        region = Region("", self.line, run, self.made, trained(reads), self.draws)
        return self.result.filled(call_region(region, reads, [own[key] for key in self.written]))


class Replay(Calls):
    """Runs the tail of a step.

    Args:
        tail: the tail.
        received: the tensors that it reads, by place.
    """

    def __init__(self, tail: TailRegion, received: Mapping[Place, Tensor]) -> None:
        super().__init__()
        self._tail, self._received = tail, received
        self._device = next((tensor.device for tensor in received.values()), torch.device("cpu"))

    def metadata(self, func: Any, args: Any) -> Any:
        found = func(*args)
        return self._device if isinstance(found, torch.device) and found.type == "meta" else found

    def call(self, number: int, func: Any, run: Callable[[], Any], given: Any) -> Any:
        tail = self._tail
        if number >= len(tail.names):
            self._refuse_stand_ins(func, given)
            return run()
        if tail.names[number] != name_of(func):
            raise RequestError(
                f"{tail.line}: the step calls {name_of(func)} here where it called {tail.names[number]} for the "
                "example: up to the first line that needs a value it must do the same each time"
            )
        if number in tail.read_before or func in _MODES:
            return run()
        leaves, nesting = tail.returned[number]
        tensors = tensors_of(given)

        def result(position: int, leaf: Any) -> Any:
            if type(leaf) is _Argument:
                return tensors[leaf.number]
            if (number, position) in self._received:
                return self._received[number, position]
            # A new one each time: a function with a cache of its results would find the same arguments again.
            return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf

        return pytree.tree_unflatten([result(*each) for each in enumerate(leaves)], nesting)

    def _refuse_stand_ins(self, func: Any, given: Any) -> None:
        if func in METADATA_READS or not any(tensor.is_meta for tensor in tensors_of(given)):
            return
        raise RequestError(
            f"{self._tail.line}: after this line the step reads a tensor in {name_of(func)} that it did not read for "
            "the example: compute it after this line, in the branch that reads it, or read it in all branches (add "
            "0 * tensor.sum() where it is not needed), or give an example batch for which it is read"
        )


_MODES = {torch._C._set_grad_enabled}
"""Calls that change how later ones run."""
