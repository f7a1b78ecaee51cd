"""Module regions: a run with real tensors records the results of their calls; a capture makes each call a region."""

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from ...errors import RequestError
from ...tensor_metadata import state_of
from ..graph.randomness import KeyedRandom, random_key
from ..python.changes import INTERNAL, Changes, is_mutable
from ..values.capture_errors import NeedsValue
from ..values.fake_tensors import stand_in_for
from ..values.late_numbers import holds_captured
from ..values.nesting import Nesting, extract_tensors, tensors_of
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


class CapturedOtherwise(RequestError):
    """A module gets other arguments while it is captured than in eager PyTorch, and fails with them."""


@frozen
class _Call:
    """The observation of one call of a module.

    Args:
        result: the nesting of its result and of the values of ``assigned``.
        made: the tensors of the result, and then the buffers that it wrote.
        written: names of these buffers.
        draws: number of random draws.
        given: shape of every leaf of its arguments; None for a leaf that is not a tensor.
        assigned: attributes that were assigned tensors, as (module, name).
        varies: whether the shapes of its result depend on values, as of detected objects.
    """

    result: Nesting
    made: tuple[TensorSpec, ...]
    written: tuple[str, ...]
    draws: int
    given: tuple[tuple[int, ...] | None, ...]
    assigned: tuple[tuple[str, str], ...] = ()
    varies: bool = False


@define(eq=False)
class ModuleRegions:
    """The modules that stay Python.

    Args:
        model: the user's.

    Attributes:
        lines: name of a module → the user's line that cannot be captured.
    """

    model: nn.Module
    lines: dict[str, str] = field(factory=dict)
    _calls: dict[str, list[_Call]] = field(factory=dict)
    _copies: dict[str, Copies] = field(factory=dict)

    def keep(self, name: str, line: str) -> None:
        """Add a module and all others of its class; a module inside of another one is part of that one's region."""
        kind = type(self.model.get_submodule(name))
        alike = [n for n, module in self.model.named_modules() if n and type(module) is kind]
        lines = {**self.lines, **dict.fromkeys(alike, line)}
        self.lines = {n: lines[n] for n in lines if not any(n.startswith(f"{outer}.") for outer in lines)}

    def forget_calls(self) -> None:
        """Delete the observations of calls, before another run."""
        model = {id(t): t.detach().to("meta") for t in (*self.model.parameters(), *self.model.buffers())}
        self._copies = {name: Copies(copy_on_meta(self.model.get_submodule(name), model)) for name in self.lines}
        self._calls = {name: [] for name in self.lines}

    @contextmanager
    def watched(self, random: KeyedRandom, changes: Changes) -> Iterator[None]:
        """The context of a run of the model in which calls are observed.

        Args:
            random: counts the random draws of the run.
            changes: of runs of the step.
        """

        def wrap(name: str, module: nn.Module) -> Callable[..., Any]:
            original = module.forward

            def forward(*args: Any, **kwargs: Any) -> Any:
                other = _other_shapes(module, original, random, changes, args, kwargs)
                result, call = _watched(self._who(name), module, original, random, args, kwargs)
                shapes = [tensor.shape for tensor in tensors_of(result)]
                self._calls[name].append(evolve(call, varies=other is not None and other != shapes))
                return result

            return forward

        with forwards_replaced(self.model, self.lines, wrap):
            yield

    @contextmanager
    def called(self, model: nn.Module, tried: bool) -> Iterator[None]:
        """The context of a capture, in which calls of the modules are regions.

        Args:
            model: the captured model, with captured tensors.
            tried: whether calls that were not observed are run with random numbers, for a model without values.
        """

        def wrap(name: str, module: nn.Module) -> Callable[..., Any]:
            counted = iter(range(1 << 30))
            return lambda *args, **kwargs: self._call(name, module, next(counted), tried, args, kwargs)

        with forwards_replaced(model, self.lines, wrap):
            yield

    def _who(self, name: str) -> str:
        return f"{self.lines[name]}: module '{name}'"

    def _call(self, name: str, module: nn.Module, number: int, tried: bool, args: Any, kwargs: Any) -> Any:
        calls, copies = self._calls[name], self._copies[name]
        if number == len(calls) and tried:
            calls.append(_tried(self._who(name), copies, args, kwargs))
        if number >= len(calls):
            raise RequestError(
                f"{self._who(name)} was called {len(calls)} times for the example and is called more "
                "often when captured; call it as often each time"
            )
        call = calls[number]
        if call.varies:  # what reads its results is captured for their shapes, so it stays Python, too
            raise NeedsValue(f"the shapes of what module '{name}' returns depend on values")
        _refuse_captured_attributes(self._who(name), module, call.assigned)
        given_here = _shapes((args, kwargs))
        if given_here != call.given and _are_known(given_here):
            _refuse_failing(self._who(name), copies, args, kwargs)
        tensors, given = extract_tensors((args, kwargs))
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        names = [*parameters, *buffers]

        def run(values: list[Tensor]) -> list[Tensor]:
            args, kwargs = given.filled(values)
            state = dict(zip(names, values[len(tensors) :], strict=True))
            with copies.running(self._who(name), state, call.written) as bare:
                made = bare(*args, **kwargs)
                found, result = extract_tensors((made, _values_of(bare, call.assigned)))
            if (difference := call.result.difference(result)) is not None:
                raise RequestError(
                    f"{self._who(name)} returns {difference}, which it returned for the example: results that are not "
                    "tensors must not depend on tensors' values; return a tensor"
                )
            return [*found, *(state[key] for key in call.written)]

        reads = [*tensors, *parameters.values(), *buffers.values()]
        region = Region(name, self.lines[name], run, call.made, trained(reads), call.draws)
        found = call_region(region, reads, [buffers[key] for key in call.written])
        result, values = call.result.filled(found)
        for (path, key), value in zip(call.assigned, values, strict=True):
            vars(module.get_submodule(path))[key] = value
        return result


def _shapes(given: Any) -> tuple[tuple[int, ...] | None, ...]:
    leaves = pytree.tree_leaves(given)
    return tuple(tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves)


def _are_known(shapes: tuple[tuple[int, ...] | None, ...]) -> bool:
    """Whether all sizes are known; a call with sizes that depend on values, as of packed sequences, cannot be tried."""
    return all(type(size) is int for shape in shapes for size in shape or ())


def _refuse_failing(who: str, copies: Copies, args: Any, kwargs: Any) -> None:
    """Refuse a call that gets other arguments than in eager PyTorch, and fails with them.

    Some libraries check whether they are captured, and then pass a mask that they do not pass in eager PyTorch.

    Raises:
        CapturedOtherwise: it fails.
    """
    try:
        _tried(who, copies, args, kwargs)
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        raise CapturedOtherwise(
            f"{who} stays Python and fails with its arguments while the step is captured, which differ from those in "
            f"eager PyTorch: {type(error).__name__}: {first[:200]}; do not call torch.compiler.is_compiling() in the "
            "code around it, or choose an option of the model that avoids it"
        ) from error


def _refuse_captured_attributes(who: str, module: nn.Module, assigned: Collection[tuple[str, str]]) -> None:
    """Refuse a module with an attribute that the step set to a computed tensor before the call.

    Args:
        who: the module's name, with its line.
        module: the module.
        assigned: attributes that its own calls assign.

    Raises:
        RequestError: it has such an attribute.
    """
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}  # a recurrent layer lists its weights
    for path, one in module.named_modules():
        for key, value in vars(one).items():
            if key in INTERNAL or (path, key) in assigned:
                continue
            if holds_captured([leaf for leaf in pytree.tree_leaves(value) if id(leaf) not in own]):
                raise RequestError(
                    f"{who} stays Python, and its attribute '{key}' is set to a tensor that the step computed: "
                    "pass it as an argument"
                )


def _tried(who: str, copies: Copies, args: Any, kwargs: Any) -> _Call:
    """The observation of a call with random numbers in place of all values."""
    tensors, given = extract_tensors((args, kwargs))

    def try_it() -> _Call:
        args, kwargs = given.filled([stand_in_for(tensor) for tensor in tensors])
        with copies.lent() as bare:
            state = {key: stand_in_for(t) for key, t in (*bare.named_parameters(), *bare.named_buffers())}
            with KeyedRandom(random_key(0, 0, 0)) as random, _reparametrize_module(bare, state, tie_weights=True):
                return _watched(who, bare, bare.forward, random, args, kwargs)[1]

    with ThreadPoolExecutor(1) as elsewhere:  # torch's modes of the running capture do not apply in another thread
        return elsewhere.submit(try_it).result()


def _other_shapes(
    module: nn.Module,
    forward: Callable[..., Any],
    random: KeyedRandom,
    changes: Changes,
    args: Any,
    kwargs: Any,
) -> list[torch.Size] | None:
    """The shapes of what a module returns for the same numbers in another order, or None if it fails with them."""
    tensors, given = extract_tensors((args, kwargs))
    turned = [t.detach().flip(*range(t.ndim)) if t.is_floating_point() else t.clone() for t in tensors]
    args, kwargs = given.filled(turned)
    drawn, buffers = random.ordinal, {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        with changes.of_run(module), _reparametrize_module(module, buffers), torch.no_grad():
            return [tensor.shape for tensor in tensors_of(forward(*args, **kwargs))]
    except Exception:
        return None
    finally:
        random.ordinal = drawn


def _watched(
    who: str,
    module: nn.Module,
    forward: Callable[..., Any],
    random: KeyedRandom,
    args: Any,
    kwargs: Any,
) -> tuple[Any, _Call]:
    """Call a module with real tensors; return its result and the observation of the call.

    Raises:
        RequestError: it writes its arguments in place, or replaces the data of a parameter.
    """
    given, parameters, old = tensors_of((args, kwargs)), dict(module.named_parameters()), dict(module.named_buffers())
    states = {id(tensor): state_of(tensor) for tensor in (*given, *parameters.values(), *old.values())}
    draws, before = random.ordinal, _attributes(module)
    result = forward(*args, **kwargs)
    state = dict(module.named_buffers())
    written = tuple(
        key for key, b in state.items()
        if may_be_written(b) or b is not old.get(key) or state_of(b) != states[id(b)]
    )  # fmt: skip
    ids = {id(tensor) for tensor in (*parameters.values(), *old.values())}
    if any(state_of(tensor) != states[id(tensor)] for tensor in given if id(tensor) not in ids):
        raise RequestError(
            f"{who} writes its arguments in place: a part that stays Python may not do that; write into a .clone()"
        )
    other = next((key for key, p in parameters.items() if state_of(p)[1:] != states[id(p)][1:]), None)
    if other is not None:
        raise RequestError(
            f"{who} assigns .data of its parameter '{other}': only the optimizer may change parameters; write it "
            "between steps, or make it a buffer"
        )
    assigned = _assigned(who, module, before)
    tensors, nesting = extract_tensors((result, _values_of(module, assigned)))
    results = [*tensors, *(state[key] for key in written)]
    return result, _Call(
        nesting,
        tuple(map(TensorSpec.like, results)),
        written,
        random.ordinal - draws,
        _shapes((args, kwargs)),
        assigned,
    )


_Attributes = dict[tuple[str, str], tuple[Any, list[Any]]]
"""(module, name) → an attribute's value, and what it holds if it is a container."""


def _attributes(module: nn.Module) -> _Attributes:
    """The attributes of a module and of those in it, apart from what capture handles elsewhere."""
    return {
        (path, key): (value, _entries(value))
        for path, one in module.named_modules()
        for key, value in vars(one).items()
        if key not in (*INTERNAL, "forward", "training")
    }


def _entries(value: Any) -> list[Any]:
    return list(value.values() if isinstance(value, dict) else value) if is_mutable(value) else []


def _assigned(who: str, module: nn.Module, before: _Attributes) -> tuple[tuple[str, str], ...]:
    """The attributes that a call assigned tensors, such as a router's loss. A copy of the module runs, so they are
    returned with its results, and assigned to the captured module.

    Raises:
        RequestError: the call put tensors into a list or dict that is an attribute.
    """
    found: list[tuple[str, str]] = []
    for (path, key), (value, entries) in _attributes(module).items():
        old, then = before.get((path, key), (None, []))
        if value is not old and tensors_of(value):
            found.append((path, key))
        elif value is old and tensors_of(entries) and any(a is not b for a, b in zip_longest(entries, then)):
            raise RequestError(
                f"{who} stays Python and puts tensors into its attribute '{key}', which do not reach the rest of the "
                "step: return them from its forward"
            )
    return tuple(found)


def _values_of(module: nn.Module, assigned: Collection[tuple[str, str]]) -> tuple[Any, ...]:
    """The present values of attributes, given as (module, name); None for an attribute that does not exist."""
    return tuple(vars(module.get_submodule(path)).get(key) for path, key in assigned)
