"""What a step changes while captured: it is put back; what it keeps for its next run is a buffer or refused.

    a tensor that a module assigns to an attribute or a buffer    ──▶ a buffer, written in each run
    a constant that is set up, such as a table of positions       ──▶ computed again in each run
    a flag, such as ``self.ready = True``                         ──▶ captured again with it: the same graph, or refused
    another computed value that the step may read again           ──▶ captured again with it: not used, or refused
    a counter that the step reads                                 ──▶ refused, with the line
    a value that the step only writes, such as a list of losses   ──▶ put back, with a warning

A captured step runs its Python once, so another value would be that of the capture in all steps.
"""

import copy
import logging
import random
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import is_
from typing import Any

import numpy
import torch
from attrs import define, field
from torch import Tensor, nn

from ...errors import RequestError
from ...wording import module_text
from ..values.capture_errors import WritesTensor
from ..values.code_origin import is_users_own
from ..values.fake_tensors import have_equal_shapes
from ..values.late_numbers import holds_captured
from ..values.nesting import tensors_of
from ..values.printed import output_held
from ..values.user_lines import warn_at
from .guards import Guards
from .named import MISSING, Named, is_plain, items_of

INTERNAL = {"_parameters", "_buffers", "_modules"}
"""Attributes of modules that hold their parameters, buffers and submodules."""
FIX = (
    "the Python of a captured step runs only once; make it a buffer of the model, give it with the batch as a tensor, "
    "or change it between steps"
)
IsConstant = Callable[[Any], bool]
"""Whether a value is the same in each run of the step, such as a table of positions."""


def is_mutable(value: Any) -> bool:
    """Whether a value is a container whose contents are put back."""
    return type(value) in (list, dict, set, deque, defaultdict, OrderedDict)


@define(eq=False)
class _Change:
    """A value that a run of a step changed.

    Args:
        what: the value in words, for messages.
        old, new: before and after it; for a container, one of its items.
        named: the uses of the value in code; None if code does not name it.
        own: whether it belongs to a module of the model.
        redo: changes the value in this way again.
        sets_up: whether the run also assigned a constant there, such as a table with this number of rows.
        filled: whether the value is a container whose items were changed.
    """

    what: str
    old: Any
    new: Any
    named: Named | None
    own: bool
    redo: Callable[[], object]
    sets_up: bool = False
    filled: bool = False


@define(eq=False)
class Changes:
    """What runs of a step change outside of the model's parameters and buffers.

    Args:
        guards: the values that the step's code names, before it runs.
        is_constant: of tensors that the step computes.

    Attributes:
        kept: name of a value that holds what the last run computed, and that another run may use; "" without one.
        flag: the line that reads a flag that the last run set, and the flag in words; None without one.
        flags: set the flags that the last run set.
        following: whether runs start with what the last run left, to find out whether they use it.
    """

    guards: Guards
    is_constant: IsConstant
    kept: str = ""
    flag: tuple[str, str] | None = None
    following: bool = False
    flags: list[Callable[[], object]] = field(factory=list)
    _redo: list[Callable[[], object]] = field(factory=list)

    @contextmanager
    def of_run(self, model: nn.Module, judged: bool = False) -> Iterator[None]:
        """The context of one run; at its end, attributes of modules and values that code names are put back.

        Args:
            model: the user's module, perhaps with captured tensors.
            judged: whether a change is refused or reported if it matters to a next run.

        Raises:
            WritesTensor: a module assigns a tensor to an attribute that has one and is not a buffer.
            RequestError: the step keeps another value that it reads again.
        """
        changes: list[_Change] = []
        with ExitStack() as stack:
            tensors = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
            stack.enter_context(self._outside(model, changes))
            for name, module in model.named_modules():
                if not isinstance(module, torch.jit.ScriptModule):
                    stack.enter_context(self._of_module(module_text(name), module.__dict__, tensors, changes))
            for again in self._redo if self.following and judged else ():
                again()
            yield
        if judged:
            self._judge(changes)

    @contextmanager
    def _of_module(self, who: str, own: dict[str, Any], tensors: set[int], changes: list[_Change]) -> Iterator[None]:
        """The context of a run, for one module's attributes.

        Args:
            who: the module in words.
            own: its attributes.
            tensors: identities of the model's parameters and buffers.
            changes: gets what was changed.
        """
        before = dict(own)
        contents = [(key, value, copy.copy(value)) for key, value in own.items() if is_mutable(value)]
        try:
            yield
        finally:
            assigned = {
                key: value for key, value in own.items()
                if value is not before.get(key, MISSING)
                # parameters in a list, such as a recurrent layer keeps
                and not ((held := tensors_of(value)) and tensors.issuperset(map(id, held)))
            }  # fmt: skip
            sets_up = any(tensors_of(value) and self.is_constant(value) for value in assigned.values())
            for key in own.keys() - before.keys():
                del own[key]
            own.update(before)
            for key, value in assigned.items():
                old, redo = before.get(key, MISSING), partial(own.__setitem__, key, value)
                plain = is_plain(value) and old is not MISSING and not (is_plain(old) and value == old)
                if holds_captured(value) or plain:
                    named = self._named((id(own), key))
                    changes.append(_Change(_attribute(key, who), old, value, named, True, redo, sets_up))
            for key, held, content in contents:
                filled = _filled(_attribute(key, who), held, content, self._named((id(own), key)), True)
                if key not in INTERNAL:
                    changes += [one for one in filled if holds_captured(one.new) or _is_number(one.new)]

    @contextmanager
    def _outside(self, model: nn.Module, changes: list[_Change]) -> Iterator[None]:
        """The context of a run, for values outside of modules, and caches of functions, which may hold captured values.

        Args:
            model: the user's module.
            changes: gets what was changed.
        """
        found, modules = self.guards.found, {id(module.__dict__) for module in model.modules()}
        values = [(each, each.now()) for each in found.named.values() if id(each.holder) not in modules]
        contents = [(place, held, copy.copy(held)) for place, held in found.containers.values()]
        caches = [(cache, cache.cache_info().misses) for cache in found.caches.values()]
        try:
            yield
        finally:
            for each, old in values:
                if (new := each.now()) is not old:
                    each.assign(old)
                    if not (is_plain(new) and is_plain(old) and not holds_captured(new) and new == old):
                        changes.append(_Change(f"'{each.place}'", old, new, each, False, partial(each.assign, new)))
            for place, held, content in contents:
                holders = (named for named in found.named.values() if named.value is held)
                changes += _filled(f"'{place}'", held, content, next(holders, None), False)
            for cache, misses in caches:
                if cache.cache_info().misses != misses:
                    cache.cache_clear()

    def _named(self, key: tuple[int, str]) -> Named | None:
        return self.guards.found.named.get(key)

    def _judge(self, changes: list[_Change]) -> None:
        """Refuse or report the changes of a run, or keep what another run must not use; see the module."""
        self.kept, self.flag, self.flags, self._redo = "", None, [], []
        failures: list[Exception] = []
        warned: list[tuple[str, str]] = []
        for change in changes:
            new, old, named = change.new, change.old, change.named
            captured, state = holds_captured(new), isinstance(old, Tensor)
            alike = state and not change.filled and isinstance(new, Tensor) and have_equal_shapes(old, new)
            table = tensors_of(new) and self.is_constant(new) and not (state and old.is_meta) and not alike
            if table or (change.sets_up and not captured):
                continue
            if change.own and alike:
                failures.insert(0, WritesTensor(old, named.written_at if named is not None else "", assigned=True))
                continue
            if named is not None and _counts(old, new) and named.carried:
                failures.append(
                    RequestError(f"{named.read_at}: the step reads {change.what} here and writes it, too: {FIX}")
                )
                continue
            early = named is not None and named.early
            # A tensor that code does not assign by name is set by a hook that computes a weight.
            if captured and (not change.own or (early and (not state or (named is not None and named.written_at)))):
                self.kept = self.kept or change.what
                self._redo.append(change.redo)
                if change.own:  # followed in another capture, in which a use of it is refused
                    continue
            elif not captured and is_plain(new) and named is not None and early:
                self.flag = self.flag or (named.read_at, change.what)
                self.flags.append(change.redo)
                self._redo.append(change.redo)
                continue
            line = (named.written_at or named.read_at) if named is not None else ""
            used = bool(self.guards.found.reading(named.key)) if named is not None and change.own else True
            hidden = change.own and captured and (used or not is_users_own(line.rpartition(":")[0]))
            counted = named is not None and not named.is_set and _counts(old, new)
            if line and not hidden and (captured or counted or not change.own):
                warned.append((line, f"the step writes {change.what}: {FIX}, or return it as a metric"))
        if failures:
            raise failures[0]
        for line, message in warned:
            warn_at(line, message)


@contextmanager
def random_states_kept() -> Iterator[None]:
    """A context at whose end the generators of torch, numpy and Python are as they were at its start."""
    python, array = random.getstate(), numpy.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(array)


@contextmanager
def isolated(model: nn.Module, changes: Changes) -> Iterator[None]:
    """The context of a run of a step without side effects, for example to find shapes.

    The step prints, warns and logs nothing. Afterwards modules, the values that its code names and the states of the
    random number generators are as before.

    Args:
        model: the user's module.
        changes: of runs of the step.
    """
    disabled = logging.root.manager.disable
    try:
        logging.disable(logging.CRITICAL)
        with random_states_kept(), warnings.catch_warnings(), output_held(), changes.of_run(model):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _attribute(key: str, who: str) -> str:
    return f"the attribute '{key}' of {who}"


def _filled(what: str, held: Any, before: Any, named: Named | None, own: bool) -> list[_Change]:
    """The change of a container, whose contents are put back; by the first item that may be a state."""
    now, then = items_of(held), items_of(before)
    if len(now) == len(then) and all(map(is_, now, then)):
        return []
    redo = partial(_refill, held, copy.copy(held))
    _refill(held, before)
    pairs = [(old, new) for old, new in zip(then, now, strict=False) if old is not new]
    states = [pair for pair in pairs if isinstance(pair[0], Tensor) or _is_number(pair[0])]
    old, new = states[0] if states and len(now) == len(then) else (None, now)
    return [_Change(what, old, new, named, own, redo, filled=True)]


def _refill(value: Any, contents: Any) -> None:
    """Replace a container's contents."""
    value.clear()
    if isinstance(value, dict | set):
        value.update(contents)
    else:
        value.extend(contents)


def _counts(old: Any, new: Any) -> bool:
    return _is_number(old) and _is_number(new) and bool(old != new)


def _is_number(value: Any) -> bool:
    """Whether a value is a number; not a flag, and not a late number, which ``isinstance`` accepts."""
    return issubclass(type(value), int | float) and type(value) is not bool


@contextmanager
def assigned_buffers_written(
    model: nn.Module, assigned_names: set[str], is_constant: IsConstant = lambda value: True
) -> Iterator[None]:
    """A context at whose end the new values of every assigned buffer are written into its old tensor.

    A constant table that is set up, or that grows, is restored instead: a buffer that was None or did not exist, and a
    buffer with ``persistent=False`` that gets another shape.

    Args:
        model: the user's module.
        assigned_names: is replaced by the names of the assigned buffers.
        is_constant: whether a tensor that the step computes is the same in each run.

    Raises:
        RequestError: the new tensor has another shape or dtype, and is no such table.
    """
    before = [(name, module, dict(module._buffers)) for name, module in model.named_modules()]
    assigned_names.clear()
    yield
    written: list[tuple[Tensor, Tensor]] = []
    for name, module, buffers in before:
        for key, assigned in list(module._buffers.items()):
            buffer, path = buffers.get(key), f"{name}.{key}" if name else key
            if assigned is buffer:
                continue
            if buffer is not None and isinstance(assigned, Tensor) and have_equal_shapes(assigned, buffer):
                assigned_names.add(path)
                # Before any is written: it may be another buffer's old value.
                written.append((buffer, assigned.detach()))
            elif buffer is not None or holds_captured(assigned):
                table = buffer is None or key in module._non_persistent_buffers_set
                if not (table and is_constant(assigned)):
                    raise _shape_refusal(path, buffer, assigned)
            if key in buffers:
                module._buffers[key] = buffer
            elif holds_captured(assigned):
                del module._buffers[key]
                module._non_persistent_buffers_set.discard(key)
    for buffer, value in written:
        buffer.copy_(value)


def _shape_refusal(path: str, buffer: Tensor | None, assigned: Any) -> RequestError:
    what = f"{assigned.dtype} {tuple(assigned.shape)}" if isinstance(assigned, Tensor) else repr(assigned)
    if buffer is None:
        return RequestError(
            f"the step assigns {what} to buffer '{path}', which is None before, and later steps read it: create it "
            "when the model is built"
        )
    return RequestError(
        f"the step assigns {what} to buffer '{path}', which is {buffer.dtype} {tuple(buffer.shape)}: a buffer keeps "
        "its shape and dtype; allocate it large enough, or register a table that grows with persistent=False"
    )
