"""What a step changes while captured: it is put back; what it keeps for its next run is a buffer or refused.

    a tensor that a module assigns to an attribute or a buffer    ──▶ a buffer, written in each run
    a constant that is set up, such as a table of positions       ──▶ computed again in each run
    a flag, such as ``self.ready = True``                         ──▶ captured again with it: the same graph, or refused
    another value that the step also reads, such as a counter     ──▶ refused, with the line
    a value that the step only writes, such as a list of losses   ──▶ put back, with a warning

A captured step runs its Python once, so another value would be that of the capture in all steps.
"""

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn

from ...errors import RequestError
from ...wording import module_text
from ..values.code_origin import is_users_own
from ..values.fake_tensors import have_equal_shapes
from ..values.late_numbers import holds_captured
from ..values.nesting import tensors_of
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


class WritesTensor(Exception):
    """A module keeps a tensor from one call to the next in an attribute that is not a buffer.

    Args:
        tensor: the attribute's value before.
    """

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tuple(tensor.shape))
        self.tensor = tensor


@contextmanager
def modules_restored(model: nn.Module) -> Iterator[None]:
    """The context of runs of a model; at its end, all attributes, buffers and hooks of its modules are as before."""
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    before = [(module.__dict__, dict(module.__dict__)) for module in modules]
    held = [value for _, values in before for key, value in values.items() if key in INTERNAL or is_mutable(value)]
    contents = [(value, copy.copy(value)) for value in held]
    try:
        yield
    finally:
        for own, values in before:
            for key in own.keys() - values.keys():
                del own[key]
            own.update(values)
        for value, content in contents:
            refill(value, content)


def refill(value: Any, before: Any) -> None:
    """Replace a container's contents by its earlier ones, if they are others."""
    if len(value) == len(before) and all(map(is_, items_of(value), items_of(before))):
        return
    value.clear()
    if isinstance(value, dict | set):
        value.update(before)
    else:
        value.extend(before)


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
        own: whether it is an attribute of a module.
        used: whether any code of the step reads an attribute of its name.
        sets_up: whether the run also assigned a constant there, such as a table with this number of rows.
        filled: whether the value is a container whose items were changed.
    """

    what: str
    old: Any
    new: Any
    named: Named | None
    own: bool
    used: bool = True
    sets_up: bool = False
    filled: bool = False

    def judged(self, is_constant: IsConstant) -> Exception | tuple[str, str] | None:
        """An exception that refuses the change, or a line and a warning, or neither."""
        read = self.named.read_at if self.named is not None else ""
        captured, state = holds_captured(self.new), isinstance(self.old, Tensor)
        alike = state and not self.filled and isinstance(self.new, Tensor) and have_equal_shapes(self.old, self.new)
        table = tensors_of(self.new) and is_constant(self.new) and not (state and self.old.is_meta) and not alike
        if table or (self.sets_up and not captured):
            return None
        if self.own and alike:
            return WritesTensor(self.old)
        by_name = self.named is not None and bool(self.named.written_at)
        # Values that hold what was computed are followed in another capture.
        carries = self.named is not None and (
            (captured and self.own and self.named.early) or (_counts(self.old, self.new) and self.named.carried)
        )
        if carries and (by_name or not state):  # otherwise by setattr, as hooks do that compute a weight
            return RequestError(f"{read}: the step reads {self.what} here and writes it, too: {FIX}")
        line = (self.named.written_at or read) if self.named is not None else ""
        if not line or (self.own and captured and (self.used or not is_users_own(line.rpartition(":")[0]))):
            return None
        return line, f"the step writes {self.what}: {FIX}, or return it as a metric"


@define(eq=False)
class Changes:
    """What runs of a step change outside of the model's parameters and buffers.

    Args:
        guards: the values that the step's code names, before it runs.
        is_constant: of tensors that the step computes.

    Attributes:
        flags: attributes of modules that the step set to another flag, and reads: a line and the attribute in words.
        following: whether runs start with the computed values that an earlier run left in attributes of modules, to
            find out whether they use them.
    """

    guards: Guards
    is_constant: IsConstant
    flags: list[tuple[str, str]] = field(factory=list)
    following: bool = False
    _left: dict[tuple[int, str], tuple[dict[str, Any], Any, str]] = field(factory=dict)
    _of_key: dict[tuple[int, Any], Named] = field(init=False)
    _holding: dict[int, Named] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._of_key = self.guards.found.named
        self._holding = {id(named.value): named for named in self._of_key.values()}

    @contextmanager
    def of_attributes(self, model: nn.Module) -> Iterator[None]:
        """The context of one run of a model with captured tensors; at its end, its modules' attributes are put back.

        Raises:
            WritesTensor: a module assigns a tensor to an attribute that has a tensor and is not a buffer.
            RequestError: a module keeps another value that it reads again.
        """
        modules = [(module_text(name), module.__dict__) for name, module in model.named_modules()]
        before = [(who, own, dict(own), _contents(own)) for who, own in modules]
        for (_, key), (own, value, _) in self._left.items() if self.following else ():
            own[key] = value
        changes: list[_Change] = []
        finished = False
        try:
            yield
            finished = True
        finally:
            own_now = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
            for who, own, values, contents in before:
                changed = [
                    (key, value) for key, value in own.items()
                    if key not in INTERNAL and value is not values.get(key, MISSING)
                ]  # fmt: skip
                sets_up = any(tensors_of(value) and self.is_constant(value) for _, value in changed)
                for key, value in changed:
                    if (tensors := tensors_of(value)) and own_now.issuperset(map(id, tensors)):
                        own[key] = values.get(key, MISSING)  # parameters in a list, such as a recurrent layer keeps
                    else:
                        changes += self._assigned(own, key, values.get(key, MISSING), who, sets_up, finished)
                for key, content in contents.items():
                    if own.get(key) is values[key]:
                        named = self._of_key.get((id(own), key))
                        changes += _filled(_named(key, who), values[key], content, named, True)
        if finished:
            self._report(changes)

    def _assigned(
        self, own: dict[str, Any], key: str, old: Any, who: str, sets_up: bool, finished: bool
    ) -> list[_Change]:
        """Put back an attribute that a module assigned; return the change if it matters."""
        value, named = own[key], self._of_key.get((id(own), key))
        if holds_captured(value) or (_counts(old, value) and named is not None and not named.is_set):
            if old is MISSING:
                del own[key]
            else:
                own[key] = old
            used = bool(self.guards.found.reading(key))
            change = _Change(_named(key, who), old, value, named, True, used, sets_up)
            if not holds_captured(value) or not isinstance(change.judged(self.is_constant), RequestError):
                return [change]
            if finished:
                self._left[id(own), key] = own, value, change.what
        elif finished and old is not MISSING and is_plain(value) and value != old and named is not None and named.early:
            self.flags.append((named.read_at, _named(key, who)))
        return []

    @contextmanager
    def outside(self, model: nn.Module) -> Iterator[None]:
        """The context of all runs of a capture; at its end, values outside of the model are put back.

        Raises:
            RequestError: the step also reads a value that it wrote.
        """
        modules = {id(module.__dict__) for module in model.modules()}
        named = [each for each in self._of_key.values() if id(each.holder) not in modules]
        contents = [(place, held, copy.copy(held)) for place, held in self.guards.found.containers.values()]
        changes: list[_Change] = []
        finished = False
        try:
            yield
            finished = True
        finally:
            for each in named:
                now = each.now()
                if now is not each.value:
                    each.assign(each.value)
                    plain = is_plain(now) and is_plain(each.value) and not holds_captured(now)
                    if not plain or (now != each.value and not _is_flag(each, now)):
                        changes.append(_Change(f"'{each.place}'", each.value, now, each, False))
            for place, held, content in contents:
                changes += _filled(f"'{place}'", held, content, self._holding.get(id(held)), False)
        if finished:
            self._report(changes)

    def note_flags(self) -> None:
        """Record values outside of modules that the last run set to another flag, and that the step reads."""
        for each in self._of_key.values():
            now = each.now()
            plain = is_plain(now) and not holds_captured(now) and (is_plain(each.value) or each.value is MISSING)
            if plain and now != each.value and _is_flag(each, now):
                self.flags.append((each.read_at, f"'{each.place}'"))

    def kept(self) -> str:
        """The name of a value that holds what the last run computed, and that a later run may use; "" if there is
        none."""
        for _, _, what in self._left.values():
            return what
        for each in self._of_key.values():
            if self._is_kept(each.now()):
                return f"'{each.place}'"
        containers = self.guards.found.containers.values()
        return next((f"'{place}'" for place, held in containers if any(map(self._is_kept, items_of(held)))), "")

    @contextmanager
    def tensors_removed(self, after_failure: bool = False) -> Iterator[None]:
        """The context of a run; at its end, tensors and late numbers of it are removed from values outside of modules.

        Args:
            after_failure: whether to do so only after an exception.
        """
        contents = [(held, copy.copy(held)) for _, held in self.guards.found.containers.values()]
        finished = False
        try:
            with self._caches_cleared():
                yield
            finished = after_failure
        finally:
            if not finished:
                for each in self._of_key.values():
                    if (now := each.now()) is not each.value and (tensors_of(now) or holds_captured(now)):
                        each.assign(each.value)
                for held, content in contents:
                    if any(tensors_of(item) or holds_captured(item) for item in items_of(held)):
                        refill(held, content)

    @contextmanager
    def _caches_cleared(self) -> Iterator[None]:
        """A context at whose end caches of functions that were filled are cleared: they may hold captured values."""
        caches = [(cache, cache.cache_info().misses) for cache in self.guards.found.caches.values()]
        try:
            yield
        finally:
            for cache, misses in caches:
                if cache.cache_info().misses != misses:
                    cache.cache_clear()

    def _is_kept(self, value: Any) -> bool:
        return holds_captured(value) and not self.is_constant(value)

    def _report(self, changes: list[_Change]) -> None:
        found = [change.judged(self.is_constant) for change in changes]
        failures = [one for one in found if isinstance(one, Exception)]
        if failures:
            raise next((one for one in failures if isinstance(one, WritesTensor)), failures[0])
        for one in found:
            if isinstance(one, tuple):
                warn_at(*one)


def _filled(what: str, held: Any, before: Any, named: Named | None, own: bool) -> list[_Change]:
    """The change of a container, whose contents are put back; by the first item that may be a state."""
    now, then = items_of(held), items_of(before)
    if len(now) == len(then) and all(map(is_, now, then)):
        return []
    refill(held, before)
    pairs = [(old, new) for old, new in zip(then, now, strict=False) if old is not new]
    states = [pair for pair in pairs if isinstance(pair[0], Tensor) or _is_number(pair[0])]
    old, new = states[0] if states and len(now) == len(then) else (None, now)
    if own and not holds_captured(new) and not _is_number(new):
        return []
    return [_Change(what, old, new, named, own, used=bool(named and named.read_at), filled=True)]


def _is_flag(named: Named, now: Any) -> bool:
    """Whether a plain value that a run changed may be read by another run, and is no count."""
    return named.early and not (_counts(named.value, now) and named.carried)


def _named(key: str, who: str) -> str:
    return f"the attribute '{key}' of {who}"


def _contents(own: dict[str, Any]) -> dict[str, Any]:
    return {key: copy.copy(value) for key, value in own.items() if key not in INTERNAL and is_mutable(value)}


def _counts(old: Any, new: Any) -> bool:
    return _is_number(old) and _is_number(new) and bool(old != new)


def _is_number(value: Any) -> bool:
    """Whether a value is a number or a flag; not a late number, which ``isinstance`` accepts."""
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
