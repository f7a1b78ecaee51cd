"""Where a step needs a tensor's value, and what is done there: which modules and which tail stay Python.

Capture is tried; where Python asks for a value, the innermost module that does so becomes a region, or, outside of
every module, the rest of the step does; then capture is tried again. What regions return is learned by running the step
once for real, on the example.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, fx, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from ..errors import RequestError
from .printed import Printed, noted
from .randomness import KeyedRandom, random_key
from .regions import Made, Region, call_region
from .replay import Locator, Observer, Place, Replay, Tail, numbered, skeleton
from .stand_ins import stand_in
from .values import LateNumber, LateSize, NeedsAutograd, NeedsValue, ValueWatch, with_late_numbers_as_tensors

StepFunction = Callable[[nn.Module, Any], Any]

_STAND_INS = 1 << 30
"""Most bytes of a model's missing values that numbers stand in for, while its step runs for what regions return."""

_TENSOR = object()
"""Stands for a tensor among the leaves of a nesting."""


@frozen
class _ModuleCall:
    """What one call of a module returned for the example.

    Args:
        spec: the nesting of what it returned.
        leaves: its leaves, with `_TENSOR` for every tensor.
        made: its tensors, and then the buffers that it wrote.
        written: names of these buffers.
        draws: random draws.
    """

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    made: tuple[Made, ...]
    written: tuple[str, ...]
    draws: int


@define(eq=False)
class _Tail:
    """The tail of the step: what it reads, where that is found during capture, and what it returned for the example.

    Args:
        line: where it begins.
        tail: what was observed.
        places: what it reads: place in a run, and place in capture.
        parameters, buffers: names of those that it reads.
        written: names of the buffers that it writes.
        spec: the nesting of the step's result.
        leaves: its leaves, with `_TENSOR` for every tensor and number.
        made: its tensors and numbers, the loss first, and then the buffers that it wrote.
        draws: random draws.
    """

    line: str
    tail: Tail
    places: list[tuple[Place, Place]]
    parameters: list[str]
    buffers: list[str]
    written: list[str]
    spec: pytree.TreeSpec
    leaves: list[Any]
    made: tuple[Made, ...]
    draws: int


@define(eq=False)
class Breaks:
    """The regions of a step.

    Args:
        model, step, batch: the user's; the batch holds real tensors.

    Attributes:
        modules: name of each module that is a region → the line where it needs a value.
        sizes: whether sizes that depend on values count as values.
        printed: what one run of the step prints and logs.
    """

    model: nn.Module
    step: StepFunction
    batch: Any
    modules: dict[str, str] = field(factory=dict)
    sizes: bool = False
    printed: Printed = field(factory=Printed)
    _calls: dict[str, list[_ModuleCall]] = field(factory=dict)
    _bare: dict[str, nn.Module] = field(factory=dict)
    _tail: _Tail | None = None
    _names: list[str] = field(factory=list)
    _meta: bool = False

    def __attrs_post_init__(self) -> None:
        self._meta = any(tensor.is_meta for _, tensor in self._tensors())

    @property
    def lines(self) -> dict[str, str]:
        """What stays Python, a module's name or "" for the end of the step → the line that needs a value there."""
        return {**self.modules, **({"": self._tail.line} if self._tail is not None else {})}

    # While the step is captured

    def run(self, model: nn.Module, batch: Any) -> tuple[Any, list[Tensor]]:
        """Run the step over tensors that are captured.

        Returns:
            Its result with tensors for late numbers; and the tensors that it wrote into text.

        Raises:
            NeedsValue: there is a value needed that no region has yet.
        """
        watch = ValueWatch(self.sizes)
        locator = Locator([there for _, there in self._tail.places] if self._tail is not None else ())
        counts = {name: itertools.count() for name in self.modules}
        with (
            noted() as printed,
            watch,
            self._regions_called(model, counts),
            numbered(model, list(self.modules), locator),
        ):
            try:
                result = self.step(model, batch)
            except NeedsValue as error:
                self._names = locator.names
                if self._tail is None:
                    raise
                _leave_modules(error)
                result = None
        if self._tail is not None:
            self.printed = Printed()  # the tail says it itself
            return self._call_tail(self._tail, model, batch, locator), []
        if isinstance(result[0] if isinstance(result, tuple | list) and result else result, LateNumber):
            raise RequestError(
                "the step returns a number and no scalar loss: return the tensor that backward starts from, without "
                ".item()"
            )
        self.printed = printed
        return with_late_numbers_as_tensors(result), watch.texts

    @contextmanager
    def _regions_called(self, model: nn.Module, counts: Mapping[str, Iterator[int]]) -> Iterator[None]:
        patched = []
        for name in self.modules:
            module = model.get_submodule(name)

            def forward(*args: Any, _module: nn.Module = module, _name: str = name, **kwargs: Any) -> Any:
                return self._call_module(_module, _name, next(counts[_name]), args, kwargs)

            module.forward = forward
            patched.append(module)
        try:
            yield
        finally:
            for module in patched:
                del module.forward

    def _call_module(self, module: nn.Module, name: str, number: int, args: Any, kwargs: Any) -> Any:
        if number == len(self._calls[name]) and self._meta:
            self._calls[name].append(self._tried(name, args, kwargs))
        if number >= len(self._calls[name]):
            raise RequestError(
                f"{self.modules[name]}: module '{name}' was called {len(self._calls[name])} times for the example and "
                "is called more often when captured; call it as often each time"
            )
        seen, bare = self._calls[name][number], self._bare[name]
        flat, spec = pytree.tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor)]
        others = [None if isinstance(leaf, Tensor) else leaf for leaf in flat]
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        names = [*parameters, *buffers]

        def run(given: list[Tensor]) -> list[Tensor]:
            leaves = list(others)
            for place, tensor in zip(places, given, strict=False):
                leaves[place] = tensor
            state = dict(zip(names, given[len(places) :], strict=True))
            state.update({key: state[key].clone() for key in seen.written})
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            with _reparametrize_module(bare, state):
                found = _tensors(bare(*args, **kwargs))
            return [*found, *(state[key] for key in seen.written)]

        given = [*(flat[i] for i in places), *parameters.values(), *buffers.values()]
        region = Region(name, self.modules[name], run, seen.made, _trained(given), seen.draws)
        found = call_region(region, given)
        count = len(found) - len(seen.written)
        for key, value in zip(seen.written, found[count:], strict=True):
            buffers[key].copy_(value.detach())
        return _filled(seen.spec, seen.leaves, found[:count])

    def _call_tail(self, tail: _Tail, model: nn.Module, batch: Any, locator: Locator) -> Any:
        missing = next((there for _, there in tail.places if there not in locator.found), None)
        if missing is not None:
            raise RequestError(
                f"{tail.line}: this line needs a value, and what it reads cannot be found again while the step is "
                "captured; move the line and what depends on it into a module"
            )
        bare, step, modules = skeleton(self.model), self.step, list(self.modules)
        flat, spec = pytree.tree_flatten(batch)
        places = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor)]
        names = [*tail.parameters, *tail.buffers]
        count = len(tail.places)

        def run(given: list[Tensor]) -> list[Tensor]:
            received = {here: tensor for (here, _), tensor in zip(tail.places, given, strict=False)}
            leaves = list(flat)
            for place, tensor in zip(places, given[count:], strict=False):
                leaves[place] = tensor
            state = dict(zip(names, given[count + len(places) :], strict=True))
            state.update({key: state[key].clone() for key in tail.written})
            replay = Replay(tail.tail.record, received, tail.line)
            with _reparametrize_module(bare, state), numbered(bare, modules, replay):
                found = _results(step(bare, pytree.tree_unflatten(leaves, spec)))[0]
            return [*found, *(state[key] for key in tail.written)]

        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        given = [*(locator.found[there] for _, there in tail.places), *(flat[i] for i in places)]
        given += [own[name] for name in names]
        region = Region("", tail.line, run, tail.made, _trained(given), tail.draws)
        found = call_region(region, given)
        results = len(found) - len(tail.written)
        for key, value in zip(tail.written, found[results:], strict=True):
            own[key].copy_(value.detach())
        return _filled(tail.spec, tail.leaves, found[:results])

    # When capture stopped

    def widen(self, error: BaseException, line: str) -> None:
        """Make a region of what needs a value.

        Args:
            error: what stopped capture.
            line: the user's line that needed it.

        Raises:
            RequestError: nothing more can be made one, or what it returns cannot be learned.
        """
        stopped = _needs_value(error)
        if stopped is None and not self.sizes:
            self.sizes, self.modules, self._tail = True, {}, None
            return
        if stopped is not None:
            name = self._innermost_module(stopped)
        elif isinstance(error, LateSize) and error.module:
            name = error.module
        else:
            raise RequestError(_refusal(line, error)) from error
        if name is None and isinstance(stopped, NeedsAutograd):
            raise RequestError(
                f"{line}: the step differentiates here what the model computed, which other stages then hold: "
                "move the call into the module whose results it differentiates"
            ) from error
        if name is None and self._tail is not None:
            raise RequestError(_refusal(line, error)) from error
        if name is not None:
            self._keep_module(name, line)
        self._observe(line if name is None else None)

    def keep_python(self, error: BaseException, line: str) -> bool:
        """Make a region of the module that cannot be captured for another reason than a value.

        Args:
            error: what stopped capture.
            line: the user's line that did.

        Returns:
            Whether there was one, and the step runs as it is.
        """
        name = self._innermost_module(error)
        if name is None or name in self.modules:
            return False
        self._keep_module(name, line)
        try:
            self._observe(None)
        except Exception:  # it is the step itself that fails
            return False
        return True

    def _keep_module(self, name: str, line: str) -> None:
        """Make regions of a module and of all others of its class."""
        self._tail = None  # it is found again, behind the new region
        kind = type(self.model.get_submodule(name))
        alike = [n for n, m in self.model.named_modules() if n and type(m) is kind]
        self.modules.update(dict.fromkeys(alike, line))
        outer = [n for n in self.modules if not any(n.startswith(f"{o}.") for o in self.modules)]
        self.modules = {n: self.modules[n] for n in outer}

    def _innermost_module(self, error: BaseException) -> str | None:
        """Name of the innermost module in whose code an error was raised; None for the model itself and the step."""
        names = {id(module): name for name, module in self.model.named_modules()}
        found, trace = "", error.__traceback__
        while trace is not None:
            owner = trace.tb_frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in names:
                found = names[id(owner)]
            trace = trace.tb_next
        return found or None

    def _observe(self, tail_line: str | None) -> None:
        """Run the step for real on the example; learn what its regions return."""
        self._bare = {name: skeleton(self.model.get_submodule(name)) for name in self.modules}
        self._calls = {name: [] for name in self.modules}
        missing = {n: t for n, t in self._tensors() if t.is_meta}
        if missing and tail_line is None:
            return  # each region is tried when it is called
        if sum(t.nbytes for t in missing.values()) > _STAND_INS:
            raise RequestError(
                f"{tail_line}: the step needs a value here, and the model is on the meta device and has none: "
                "move the line and what depends on it into a module, or compute both ways and choose with torch.where"
            )
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        random = KeyedRandom(random_key(0, 0, 0))
        observer = Observer(lambda: random.ordinal)
        try:
            with (
                _reparametrize_module(self.model, {name: _stand_in(tensor) for name, tensor in missing.items()}),
                noted(), random, self._regions_watched(random), numbered(self.model, list(self.modules), observer),
            ):  # fmt: skip
                result = self.step(self.model, self.batch)
            if tail_line is not None:
                self._tail = self._tail_of(observer, result, random.ordinal, tail_line)
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)

    def _tensors(self) -> list[tuple[str, Tensor]]:
        return [*self.model.named_parameters(), *self.model.named_buffers()]

    def _tried(self, name: str, args: Any, kwargs: Any) -> _ModuleCall:
        """What a call of a region returns, for a model that has no values: stand-ins take their place."""
        module, flat, spec = self._bare[name], *pytree.tree_flatten((args, kwargs))

        def try_it() -> _ModuleCall:
            given = [_stand_in(leaf) if isinstance(leaf, Tensor) else leaf for leaf in flat]
            state = {key: _stand_in(t) for key, t in (*module.named_parameters(), *module.named_buffers())}
            args, kwargs = pytree.tree_unflatten(given, spec)
            with KeyedRandom(random_key(0, 0, 0)) as random, _reparametrize_module(module, state):
                return _watched(module, module.forward, random, args, kwargs)[1]

        with ThreadPoolExecutor(1) as elsewhere:  # nothing of a capture under way reaches another thread
            return elsewhere.submit(try_it).result()

    @contextmanager
    def _regions_watched(self, random: KeyedRandom) -> Iterator[None]:
        patched = []
        for name in self.modules:
            module = self.model.get_submodule(name)

            def forward(*args: Any, _f: Any = module.forward, _m: Any = module, _n: str = name, **kwargs: Any) -> Any:
                result, seen = _watched(_m, _f, random, args, kwargs)
                self._calls[_n].append(seen)
                return result

            module.forward = forward
            patched.append(module)
        try:
            yield
        finally:
            for module in patched:
                del module.forward

    def _tail_of(self, observer: Observer, result: Any, drawn: int, line: str) -> _Tail:
        tail, number = observer.tail(self._names)
        places = [(here, (number.get(here[0], -1), here[1])) for here in tail.needed]
        if tail.record.until < 0 or any(there < 0 for _, (there, _) in places):
            raise RequestError(
                f"{line}: this line needs a value, and the step calls other operators when it is captured than when "
                "it runs; move the line and what depends on it into a module"
            )
        parameters = [n for n, p in self.model.named_parameters() if id(p) in tail.touched]
        buffers = [n for n, b in self.model.named_buffers() if id(b) in tail.touched]
        state = dict(self.model.named_buffers())
        written = [n for n in buffers if id(state[n]) in tail.written]
        tensors, spec, leaves = _results(result)
        made = tuple(map(Made.like, (*tensors, *(state[n] for n in written))))
        return _Tail(line, tail, places, parameters, buffers, written, spec, leaves, made, drawn - tail.draws)


def _stand_in(tensor: Tensor) -> Tensor:
    device = "cpu" if tensor.is_meta else tensor.device
    return stand_in(torch.empty(tensor.shape, dtype=tensor.dtype, device=device))


def _watched(
    module: nn.Module, forward: Callable[..., Any], random: KeyedRandom, args: Any, kwargs: Any
) -> tuple[Any, _ModuleCall]:
    """Call a module for real; its result, and what is to be known of the call."""
    before, draws = {key: buffer._version for key, buffer in module.named_buffers()}, random.ordinal
    old = dict(module.named_buffers())
    result = forward(*args, **kwargs)
    state = dict(module.named_buffers())
    written = tuple(key for key, b in state.items() if b is not old.get(key) or b._version != before[key])
    flat, spec = pytree.tree_flatten(result)
    made = [Made.like(tensor) for tensor in (*_tensors(result), *(state[key] for key in written))]
    leaves = tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in flat)
    return result, _ModuleCall(spec, leaves, tuple(made), written, random.ordinal - draws)


def _leave_modules(error: BaseException) -> None:
    """Have the tracer leave the modules that an exception left; it notes entering and does not see that."""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        tracer, key = frame.f_locals.get("self"), frame.f_locals.get("module_key")
        if isinstance(tracer, fx.Tracer) and key is not None:
            tracer.module_stack.pop(key, None)
        trace = trace.tb_next


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _trained(given: Sequence[Tensor]) -> dict[int, Made]:
    return {i: Made.like(tensor) for i, tensor in enumerate(given) if tensor.requires_grad}


def _filled(spec: pytree.TreeSpec, leaves: Sequence[Any], tensors: Sequence[Tensor]) -> Any:
    """A nesting with tensors in the places of its empty leaves."""
    remaining = iter(tensors)
    whole = [next(remaining) if leaf is _TENSOR else leaf for leaf in leaves]
    return pytree.tree_unflatten(whole, spec)


def _results(result: Any) -> tuple[list[Tensor], pytree.TreeSpec, list[Any]]:
    """A step's result: its tensors and numbers, all as tensors; its nesting; and its other leaves."""
    flat, spec = pytree.tree_flatten(result)
    found: list[Tensor] = []
    leaves: list[Any] = []
    for leaf in flat:
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif isinstance(leaf, bool | int | float):
            found.append(torch.tensor(float(leaf), dtype=torch.float64))
        leaves.append(_TENSOR if isinstance(leaf, Tensor | bool | int | float) else leaf)
    return found, spec, leaves


def _needs_value(error: BaseException) -> NeedsValue | None:
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, NeedsValue):
            return current
        current = current.__cause__ or current.__context__
    return None


def _refusal(line: str, error: BaseException) -> str:
    first = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return (
        f"{line}: control flow here depends on the value of a tensor ({first[:160]}) in a way that cannot stay Python: "
        "move it and what depends on it into a module of its own, or compute both ways and choose with torch.where"
    )
