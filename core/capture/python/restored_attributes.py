"""Attributes of modules, and variables of a step, that the step assigns while it is captured: they are restored.

An assigned buffer counts as written (see `assigned_buffers`). Other values that modules keep from a capture are not
those of a real step.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from attrs import define, field
from torch import Tensor, nn

from ...errors import RequestError
from ...wording import module_text
from ..values.late_numbers import holds_captured, holds_late_numbers
from ..values.user_lines import warn_at
from .holders import INTERNAL, STEP, contents_of, number_of_forward_hooks, refill, step_holders
from .pending_refusals import PendingRefusal, have_grown
from .reachable.code_names import read_line, written_line
from .reachable.compared_values import is_number
from .reached import Reached
from .side_effects import FIX

_MISSING = object()


@contextmanager
def attributes_restored(
    model: nn.Module, step: Any, reached: Reached, pending: list[PendingRefusal] | None = None
) -> Iterator[None]:
    """A context at whose end attributes and variables with captured values are restored.

    These are fake tensors, late numbers, and counts, as attributes or in lists, dicts and sets that are attributes. A
    warning is given about values that a module reads before it changes them, because they would be passed on from one
    microbatch to the next, and about those that the user's code assigns and the step does not read. Other values are
    kept, such as a flag that something is set up for all later calls.

    Args:
        model: the user's module.
        step: the user's step; attributes of its object and variables around it are restored as well.
        reached: what the step reaches.
        pending: gets the refusals of values that the step may only set up, such as a table of positions that is None at
            first; without it they are raised.

    Raises:
        WritesTensor: a module keeps a tensor from one call to the next in an attribute that is not a buffer.
        RequestError: a module or the step keeps another value that it reads again.
    """
    modules = [(module_text(name), module) for name, module in model.named_modules()]
    own = [*((label, module.__dict__) for label, module in modules), *step_holders(step)]
    before = [(label, holder, dict(holder), contents_of(holder)) for label, holder in own]
    kept = {id(module): values for (_, module), (_, _, values, _) in zip(modules, before, strict=False)}
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

    restored = _Restored(reached, read, used, lambda: hooks == number_of_forward_hooks(model), pending)
    finished = False
    try:
        with mock.patch.object(nn.Module, "__getattribute__", get, create=True):
            yield
        finished = True
    finally:
        for label, holder, values, contents in before:
            for key, value in list(holder.items()):
                old = values.get(key, _MISSING)
                if key in INTERNAL:
                    continue
                if value is not old:
                    restored.assigned(label, holder, key, old, value)
                elif key in contents and _changed(value, contents[key]):
                    restored.filled(label, key, value, contents[key])
        if finished:
            restored.report()


@define(eq=False)
class _Restored:
    """The restored values, with refusals and warnings.

    Args:
        reached: what the step reaches.
        read: (identity of a module's attributes, name) of values that were read before they were changed.
        used: the same of values that were read after they were changed.
        no_hooks: whether no hook was registered.
        pending: gets the refusals of values that the step may only set up; without it they count as failures.
    """

    reached: Reached
    read: set[tuple[int, str]]
    used: set[tuple[int, str]]
    no_hooks: Callable[[], bool]
    pending: list[PendingRefusal] | None
    remarks: list[tuple[str, str]] = field(factory=list)
    failures: list[Exception] = field(factory=list)

    def filled(self, label: str, key: str, value: Any, before: Any) -> None:
        """Restore the contents of a container."""
        if replaced := _replaced(value, before):
            refusal = _refusal(label, key, self.reached.line_of(key))
            self._add_pending(refusal) if have_grown(replaced) else self.failures.append(refusal)
        refill(value, before)
        self._note(label, key, f"with {len(value)} entries")

    def assigned(self, label: str, holder: Any, key: str, old: Any, value: Any) -> None:
        """Restore an assigned attribute or variable."""
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
        if own and early and holds_captured(value):
            refusal = _refusal(label, key, line or self.reached.line_of(key))
            if isinstance(old, Tensor) and not have_grown([(old, value)]):
                self.failures.append(WritesTensor(old))
            elif holds_late_numbers(value) and is_number(old):
                self._add_pending(refusal, key, True, self._remark(label, key, repr(old)))
            elif holds_late_numbers(value):
                self.failures.append(refusal)
            else:
                self._add_pending(refusal)
        elif counts and early and line is not None:
            self._add_pending(_refusal(label, key, line), key, remark=self._remark(label, key, repr(old)))
        elif early or counts or (own and self._is_for_later(holder, key)):
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

    def _add_pending(
        self,
        refusal: RequestError,
        number: str | None = None,
        kept: bool = False,
        remark: tuple[str, str] | None = None,
    ) -> None:
        if self.pending is None:
            self.failures.append(refusal)
        else:
            self.pending.append(PendingRefusal(refusal, number, kept, remark))

    def _note(self, label: str, key: str, now: str) -> None:
        self.remarks.append(self._remark(label, key, now))

    def _remark(self, label: str, key: str, now: str) -> tuple[str, str]:
        line = written_line(self.reached.codes, key) or self.reached.line_of(key)
        return line, _remark_text(label, key, now)


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
