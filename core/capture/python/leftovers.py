"""What a step changes in the model, as Python sees it: attributes that a forward assigns.

A buffer that is assigned anew is a buffer that is written, and becomes one in the captured graph. Everything else that
capture leaves in a module belongs to no real step.
"""

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

from attrs import define, field
from torch import Tensor, nn

from ...errors import RequestError
from ...wording import module_text
from ..values.user_lines import warn_at
from ..values.values import LateNumber, holds_captured, holds_late_numbers
from .doubts import Doubt, have_grown
from .reached import Reached
from .side_effects import FIX, read_line, written_line

_INTERNAL = {"_parameters", "_buffers", "_modules"}
_MISSING = object()
_STEP = "the step"

Holder = tuple[str, MutableMapping[str, Any]]
"""Something that keeps values under names: what it is, for people, and the values."""


@contextmanager
def attributes_kept(model: nn.Module, step: Any, reached: Reached, doubts: list[Doubt] | None = None) -> Iterator[None]:
    """Take back, at the end, what modules and the step were given within and belongs to no real step.

    That is: fake tensors, numbers that are known late, and counts, as attributes or in lists, dicts and sets that are
    attributes. What a module reads before it changes it would go from one microbatch to the next; of that it warns.
    Everything else stays: a module may have noted what it set up for all later calls.

    Args:
        model: the user's module.
        step: the user's step; what it keeps itself, or in variables around it, is taken back as well.
        reached: what the step reaches.
        doubts: gets the refusals of what may only set something up, such as a table of positions that is None at
            first; without it they are raised.

    Raises:
        WritesTensor: a module keeps a tensor from one call to the next in an attribute that is no buffer.
        RequestError: it, or the step, keeps something else that it reads again.
    """
    modules = [(module_text(name), module) for name, module in model.named_modules()]
    own = [*((label, module.__dict__) for label, module in modules), *_around(step)]
    before = [(label, holder, dict(holder), _contents(holder)) for label, holder in own]
    kept = {id(module): values for (_, module), (_, _, values, _) in zip(modules, before, strict=False)}
    read: set[tuple[int, str]] = set()
    hooks = _hooks(model)

    def get(module: nn.Module, name: str) -> Any:
        values = kept.get(id(module))
        if values is not None and not name.startswith("__"):
            now = object.__getattribute__(module, "__dict__")
            if now.get(name, _MISSING) is values.get(name, _MISSING):
                read.add((id(now), name))
        return object.__getattribute__(module, name)

    taken = _TakenBack(reached, read, lambda: hooks == _hooks(model), doubts)
    finished = False
    try:
        with mock.patch.object(nn.Module, "__getattribute__", get, create=True):
            yield
        finished = True
    finally:
        for label, holder, values, contents in before:
            for key, value in list(holder.items()):
                old = values.get(key, _MISSING)
                if key in _INTERNAL:
                    continue
                if value is not old:
                    taken.assigned(label, holder, key, old, value)
                elif key in contents and _changed(value, contents[key]):
                    taken.filled(label, key, value, contents[key])
        if finished:
            taken.report()


@define(eq=False)
class _TakenBack:
    """What was taken back, and what is refused or warned of.

    Args:
        reached: what the step reaches.
        read: (identity of a module's attributes, name) of what was read before it was changed.
        no_hooks: whether no module got a hook.
        doubts: gets the refusals of what may only set something up; without it they count as failures.
    """

    reached: Reached
    read: set[tuple[int, str]]
    no_hooks: Callable[[], bool]
    doubts: list[Doubt] | None
    remarks: list[tuple[str, str]] = field(factory=list)
    failures: list[Exception] = field(factory=list)

    def filled(self, label: str, key: str, value: Any, before: Any) -> None:
        """A container got other contents."""
        if replaced := _replaced(value, before):
            refusal = _refusal(label, key, self.reached.line_of(key))
            self._doubt(refusal) if have_grown(replaced) else self.failures.append(refusal)
        _refill(value, before)
        self._note(label, key, f"with {len(value)} entries")

    def assigned(self, label: str, holder: Any, key: str, old: Any, value: Any) -> None:
        """An attribute or a variable was assigned."""
        own = isinstance(holder, dict)
        early = (id(holder), key) in self.read if own else old is not _MISSING
        counts = _is_count(value) and (_is_count(old) or early) and value != old
        # Who hooks into modules notes that it has, and would do it again.
        flag = isinstance(value, bool) and early and value != old and self.no_hooks()
        if not (counts or flag or holds_captured(value)):
            return
        if old is _MISSING:
            del holder[key]
        else:
            holder[key] = old
        line = read_line(self.reached.codes, key)
        if own and early and holds_captured(value):
            refusal = _refusal(label, key, line or self.reached.line_of(key))
            if isinstance(old, Tensor) and not have_grown([(old, value)]):
                self.failures.append(WritesTensor(old))
            elif holds_late_numbers(value):
                self.failures.append(refusal)
            else:
                self._doubt(refusal)
        elif counts and early and line is not None:
            self._doubt(_refusal(label, key, line), key)
        elif early or counts:
            now = "none" if old is _MISSING else repr(old)[:40].partition("\n")[0]
            self._note(label, key, now)

    def report(self) -> None:
        """Raise what is refused, or warn."""
        if self.failures:
            raise next((f for f in self.failures if isinstance(f, WritesTensor)), self.failures[0])
        for line, remark in self.remarks:
            warn_at(line, remark)

    def _doubt(self, refusal: RequestError, number: str | None = None) -> None:
        if self.doubts is None:
            self.failures.append(refusal)
        else:
            self.doubts.append(Doubt(refusal, number))

    def _note(self, label: str, key: str, now: str) -> None:
        line = written_line(self.reached.codes, key) or self.reached.line_of(key)
        self.remarks.append((line, _remark(label, key, now)))


class WritesTensor(Exception):
    """A module keeps a tensor from one call to the next in an attribute that is no buffer.

    Args:
        tensor: the attribute's value before.
    """

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tuple(tensor.shape))
        self.tensor = tensor


def _refusal(label: str, key: str, line: str) -> RequestError:
    what = "a variable" if label == _STEP else "its attribute"
    return RequestError(
        f"{line}: {label} reads {what} '{key}' here and sets it in the step, from one microbatch to the next: {FIX}"
    )


def _replaced(value: Any, before: Any) -> list[tuple[Tensor, Any]]:
    """The tensors in a container that were replaced by others that are captured, with these."""
    if isinstance(value, set):
        return []
    places = value if isinstance(value, dict) else range(min(len(value), len(before)))
    olds = [before.get(place) if isinstance(value, dict) else before[place] for place in places]
    pairs = [(old, value[place]) for old, place in zip(olds, places, strict=True)]
    return [(old, new) for old, new in pairs if isinstance(old, Tensor) and new is not old and holds_captured(new)]


def _hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def _remark(label: str, key: str, now: str) -> str:
    what = "a variable" if label == _STEP else "its attribute"
    return (
        f"{label} sets {what} '{key}' in the step: captured, it keeps the value that it has now, {now}; "
        "make it a buffer if it is to change, or return it as a metric"
    )


def _around(step: Any) -> list[Holder]:
    """What a step keeps outside of the model: attributes of its own object, and variables of functions around it."""
    found: list[Holder] = []
    owner = getattr(step, "__self__", None)
    function = getattr(step, "__func__", step)
    if owner is not None and not isinstance(owner, nn.Module) and hasattr(owner, "__dict__"):
        found.append(("the step's object", _Variables(owner.__dict__, list(owner.__dict__))))
    code = getattr(function, "__code__", None)
    if code is not None:
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        found.append((_STEP, _Cells(cells)))
        found.append((_STEP, _Variables(function.__globals__, list(code.co_names))))
    return found


class _Variables(MutableMapping[str, Any]):
    """Some entries of a dict."""

    def __init__(self, values: dict[str, Any], names: list[str]) -> None:
        self._values, self._names = values, names

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._values[key] = value

    def __delitem__(self, key: str) -> None:
        del self._values[key]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if name in self._values)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Cells(_Variables):
    """Variables of the functions around a function."""

    def __init__(self, cells: dict[str, Any]) -> None:
        self._cells = cells
        super().__init__({}, list(cells))

    def __getitem__(self, key: str) -> Any:
        return self._cells[key].cell_contents

    def __setitem__(self, key: str, value: Any) -> None:
        self._cells[key].cell_contents = value

    def __iter__(self) -> Iterator[str]:
        for name, cell in self._cells.items():
            with suppress(ValueError):  # an empty cell
                _ = cell.cell_contents
                yield name


def _contents(holder: MutableMapping[str, Any]) -> dict[str, Any]:
    """Copies of the lists, dicts and sets that are kept; those of torch's own are left out."""
    return {
        key: copy.copy(value)
        for key, value in holder.items()
        if key not in _INTERNAL and type(value) in (list, dict, set, deque, defaultdict)
    }


def _changed(value: Any, before: Any) -> bool:
    """Whether a container has got what is to be taken back."""
    now, then = (list(v.values() if isinstance(v, dict) else v) for v in (value, before))
    old = {id(item) for item in then}
    new = [item for item in now if id(item) not in old]
    if any(holds_captured(item) for item in new):
        return True
    return len(now) == len(then) and any(_is_count(item) for item in new)


def _refill(value: Any, before: Any) -> None:
    value.clear()
    if isinstance(value, list | deque):
        value.extend(before)
    else:
        value.update(before)


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and type(value) not in (bool, LateNumber)


@contextmanager
def modules_kept(model: nn.Module) -> Iterator[None]:
    """Within, the model runs for real; at the end its modules have the attributes, buffers and hooks of before.

    A model that hooks into its modules at its first call notes that it has, and would do it again without the note.
    """
    before = [(module, dict(module.__dict__), _contents(module.__dict__)) for module in model.modules()]
    hooks = [held for module in model.modules() for held in module.__dict__.values() if type(held) is OrderedDict]
    tensors = [held for module in model.modules() for held in (module._buffers, module._parameters)]
    registered: list[tuple[Any, dict[str, Any]]] = [(held, dict(held)) for held in (*tensors, *hooks)]
    try:
        yield
    finally:
        for module, values, contents in before:
            module.__dict__.clear()
            module.__dict__.update(values)
            for key, value in contents.items():
                if not _same(values[key], value):
                    _refill(values[key], value)
        for held, entries in registered:
            held.clear()
            held.update(entries)


def _same(value: Any, before: Any) -> bool:
    """Whether a container has the entries that it had."""
    if len(value) != len(before):
        return False
    if isinstance(value, dict):
        return all(key in value and value[key] is item for key, item in before.items())
    if isinstance(value, set):
        return bool(value == before)
    return all(one is other for one, other in zip(value, before, strict=True))


@contextmanager
def assigned_buffers_written(
    model: nn.Module, assigned_names: set[str], doubts: list[Doubt] | None = None
) -> Iterator[None]:
    """Within, a buffer that is assigned a new tensor has, at the end, the new values written into the old one.

    A table that is set up, or that grows, is taken back: a buffer that was None or did not exist, and one that
    ``state_dict`` leaves out and that gets another shape.

    Args:
        model: the user's module.
        assigned_names: gets the names of these buffers, and no others.
        doubts: gets the refusals of what may be such a table; without it they are raised.

    Raises:
        RequestError: the new tensor has another shape or dtype.
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
            if buffer is not None and isinstance(assigned, Tensor) and _alike(assigned, buffer):
                assigned_names.add(path)
                # Before any is written: it may be another buffer's old value.
                written.append((buffer, assigned.detach()))
            elif buffer is not None or holds_captured(assigned):
                refusal = _shape_refusal(path, buffer, assigned)
                if doubts is None or (buffer is not None and key not in module._non_persistent_buffers_set):
                    raise refusal
                doubts.append(Doubt(refusal))
            if key in buffers:
                module._buffers[key] = buffer
            elif holds_captured(assigned):
                del module._buffers[key]
                module._non_persistent_buffers_set.discard(key)
    for buffer, value in written:
        buffer.copy_(value)


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def _shape_refusal(path: str, buffer: Tensor | None, assigned: Any) -> RequestError:
    what = f"{assigned.dtype} {tuple(assigned.shape)}" if isinstance(assigned, Tensor) else repr(assigned)
    if buffer is None:
        return RequestError(
            f"the step assigns {what} to buffer '{path}', which is None before, and later steps read it: create it "
            "where the model is built"
        )
    return RequestError(
        f"the step assigns {what} to buffer '{path}', which is {buffer.dtype} {tuple(buffer.shape)}: a buffer keeps "
        "its shape and dtype; allocate it large enough, or register a table that grows with persistent=False"
    )
