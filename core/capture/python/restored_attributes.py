"""Attributes of modules, and variables of a step, that the step assigns while it is captured: they are restored.

An assigned buffer counts as written (see `assigned_buffers`). Other values that modules keep from a capture are not
those of a real step.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from attrs import define, field
from torch import Tensor, nn

from ...errors import RequestError
from ...wording import module_text
from ..values.late_numbers import holds_captured
from ..values.nesting import tensors_of
from ..values.user_lines import warn_at
from .holders import INTERNAL, STEP, Holder, contents_of, number_of_forward_hooks, refill, step_holders
from .reachable.code_names import read_line, written_line
from .reachable.compared_values import is_number
from .reached import Reached
from .side_effects import FIX, IsConstant, is_table

_MISSING = object()


def _always(_value: Any) -> bool:
    return True


@contextmanager
def attributes_restored(model: nn.Module, reached: Reached, is_constant: IsConstant = _always) -> Iterator[None]:
    """A context at whose end attributes of modules with captured values are restored.

    These are fake tensors, late numbers, and counts, as attributes or in lists, dicts and sets that are attributes. A
    warning is given about values that a module reads before it changes them, because they would be passed on from one
    microbatch to the next, and about those that the user's code assigns and the step does not read. Other values are
    kept, such as a flag that something is set up for all later calls. A constant that a module sets up, such as a table
    of positions, is computed again in each run, and so may be the count of its rows.

    Args:
        model: the user's module.
        reached: what the step reaches.
        is_constant: of tensors that the step computes.

    Raises:
        WritesTensor: a module keeps a tensor from one call to the next in an attribute that is not a buffer.
        RequestError: a module keeps another value that it reads again.
    """
    modules = [(module_text(name), module, module.__dict__) for name, module in model.named_modules()]
    kept = {id(module): dict(own) for _, module, own in modules}
    read: set[tuple[int, str]] = set()
    used: set[tuple[int, str]] = set()
    hooks = number_of_forward_hooks(model)

    def get(module: nn.Module, name: str) -> Any:
        values = kept.get(id(module))
        if values is not None and not name.startswith("__"):
            now = object.__getattribute__(module, "__dict__")
            as_before = now.get(name, _MISSING) is values.get(name, _MISSING)
            (read if as_before else used).add((id(now), name))
        return object.__getattribute__(module, name)

    restored = _Restored(reached, is_constant, read, used, lambda: hooks == number_of_forward_hooks(model))
    attributes = restored.held([(label, own) for label, _, own in modules])
    with attributes, mock.patch.object(nn.Module, "__getattribute__", get, create=True):
        yield


@contextmanager
def variables_restored(step: Any, reached: Reached, is_constant: IsConstant) -> Iterator[None]:
    """The same for the variables around a step and the attributes of its object, around all runs of a capture."""
    with _Restored(reached, is_constant).held(step_holders(step)):
        yield


@define(eq=False)
class _Restored:
    """The restored values, with refusals and warnings.

    Args:
        reached: what the step reaches.
        is_constant: of tensors that the step computes.
        read: (identity of a module's attributes, name) of values that were read before they were changed.
        used: the same of values that were read after they were changed.
        no_hooks: whether no hook was registered.
    """

    reached: Reached
    is_constant: IsConstant
    read: set[tuple[int, str]] = field(factory=set)
    used: set[tuple[int, str]] = field(factory=set)
    no_hooks: Callable[[], bool] = lambda: True
    remarks: list[tuple[str, str]] = field(factory=list)
    failures: list[Exception] = field(factory=list)

    @contextmanager
    def held(self, holders: Sequence[Holder]) -> Iterator[None]:
        """The context at whose end the values of holders are restored."""
        before = [(label, holder, dict(holder), contents_of(holder)) for label, holder in holders]
        finished = False
        try:
            yield
            finished = True
        finally:
            for label, holder, values, contents in before:
                changed = [
                    (key, value) for key, value in holder.items()
                    if key not in INTERNAL and value is not values.get(key, _MISSING)
                ]  # fmt: skip
                sets_up = any(holds_captured(value) and self.is_constant(value) for _, value in changed)
                for key, value in changed:
                    self.assigned(label, holder, key, values.get(key, _MISSING), value, sets_up)
                for key, value in holder.items():
                    if value is values.get(key) and key in contents and _changed(value, contents[key]):
                        self.filled(label, key, value, contents[key])
            if finished:
                self.report()

    def filled(self, label: str, key: str, value: Any, before: Any) -> None:
        """Restore the contents of a container."""
        if any(not is_table(old, new, self.is_constant) for old, new in _replaced(value, before)):
            self.failures.append(_refusal(label, key, self.reached.line_of(key)))
        tables = bool(tensors_of(value)) and self.is_constant(value)
        refill(value, before)
        if not tables:
            self._note(label, key, f"with {len(value)} entries")

    def assigned(self, label: str, holder: Any, key: str, old: Any, value: Any, sets_up: bool) -> None:
        """Restore an assigned attribute or variable.

        Args:
            label, holder, key: its place.
            old, value: its values before and now.
            sets_up: whether the step also assigned a constant there, such as a table with this number of rows.
        """
        own = isinstance(holder, dict)
        early = (id(holder), key) in self.read if own else old is not _MISSING
        counts = is_number(value) and (is_number(old) or early) and value != old
        # Code that registers hooks sets a flag, and would register them again without it.
        flag = isinstance(value, bool) and early and value != old and self.no_hooks()
        if not (counts or flag or holds_captured(value)):
            return
        if old is _MISSING:
            del holder[key]
        else:
            holder[key] = old
        line = read_line(self.reached.codes, key)
        set_up = sets_up if counts or flag else is_table(old, value, self.is_constant)
        if own and early and not set_up and isinstance(old, Tensor):
            self.failures.append(WritesTensor(old))
        elif own and early and not set_up and tensors_of(value):
            self.failures.append(_refusal(label, key, line or self.reached.line_of(key)))
        elif early and not set_up and not flag and line is not None and (own or counts):
            self.failures.append(_refusal(label, key, line))
        elif not set_up and (early or counts or (own and self._is_for_later(holder, key))):
            now = "none" if old is _MISSING else repr(old)[:40].partition("\n")[0]
            self._note(label, key, now)

    def _is_for_later(self, holder: Any, key: str) -> bool:
        """Whether the user's code assigns an attribute that the step does not read: code after the step may."""
        return (id(holder), key) not in self.used and written_line(self.reached.codes, key, only=True) is not None

    def report(self) -> None:
        """Raise the first refusal, or give the warnings."""
        if self.failures:
            raise next((f for f in self.failures if isinstance(f, WritesTensor)), self.failures[0])
        for line, remark in self.remarks:
            warn_at(line, remark)

    def _note(self, label: str, key: str, now: str) -> None:
        line = written_line(self.reached.codes, key) or self.reached.line_of(key)
        self.remarks.append((line, _remark_text(label, key, now)))


class WritesTensor(Exception):
    """A module keeps a tensor from one call to the next in an attribute that is not a buffer.

    Args:
        tensor: the attribute's value before.
    """

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tuple(tensor.shape))
        self.tensor = tensor


def _refusal(label: str, key: str, line: str) -> RequestError:
    what = "a variable" if label == STEP else "its attribute"
    return RequestError(
        f"{line}: {label} reads {what} '{key}' here and sets it in the step, from one microbatch to the next: {FIX}"
    )


def _replaced(value: Any, before: Any) -> list[tuple[Tensor, Any]]:
    """The tensors in a container that were replaced by captured tensors, with these."""
    if isinstance(value, set):
        return []
    places = value if isinstance(value, dict) else range(min(len(value), len(before)))
    olds = [before.get(place) if isinstance(value, dict) else before[place] for place in places]
    pairs = [(old, value[place]) for old, place in zip(olds, places, strict=True)]
    return [(old, new) for old, new in pairs if isinstance(old, Tensor) and new is not old and holds_captured(new)]


def _remark_text(label: str, key: str, now: str) -> str:
    what = "a variable" if label == STEP else "its attribute"
    return (
        f"{label} sets {what} '{key}' in the step, but in a captured step it keeps the value that it has now, {now}; "
        "make it a buffer if it is to change, or return it as a metric"
    )


def _changed(value: Any, before: Any) -> bool:
    """Whether a container got captured values or counts."""
    now, then = (list(v.values() if isinstance(v, dict) else v) for v in (value, before))
    old = {id(item) for item in then}
    new = [item for item in now if id(item) not in old]
    if any(holds_captured(item) for item in new):
        return True
    return len(now) == len(then) and any(is_number(item) for item in new)
