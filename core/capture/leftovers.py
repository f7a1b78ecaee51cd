"""What a step leaves behind in the model, as Python sees it: attributes that a forward assigns.

A buffer that is assigned anew is a buffer that is written, and becomes one in the captured graph. Everything else that
capture leaves in a module belongs to no real step.
"""

import copy
import warnings
from collections import defaultdict, deque
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from ..errors import RequestError
from ..wording import module_text
from .values import LateNumber

_INTERNAL = {"_parameters", "_buffers", "_modules"}
_MISSING = object()
_STEP = "the step"

Holder = tuple[str, MutableMapping[str, Any]]
"""Something that keeps values under names: what it is, for people, and the values."""


@contextmanager
def attributes_kept(model: nn.Module, step: Any = None) -> Iterator[None]:
    """Take back, at the end, what modules and the step were given within and belongs to no real step.

    That is: fake tensors, numbers that are known late, and counts, as attributes or in lists, dicts and sets that are
    attributes. What a module reads before it changes it would go from one microbatch to the next; of that it warns.
    Everything else stays: a module may have noted what it set up for all later calls.

    Args:
        model: the user's module.
        step: the user's step; what it keeps itself, or in variables around it, is taken back as well.
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

    try:
        with mock.patch.object(nn.Module, "__getattribute__", get, create=True):
            yield
    finally:
        remarks: list[str] = []
        for label, holder, values, contents in before:
            for key, value in list(holder.items()):
                if key in _INTERNAL:
                    continue
                old = values.get(key, _MISSING)
                if value is old:
                    if key in contents and _changed(value, contents[key]):
                        _refill(value, contents[key])
                        remarks.append(_remark(label, key, f"with {len(value)} entries"))
                    continue
                early = old is not _MISSING if not isinstance(holder, dict) else (id(holder), key) in read
                counts = _is_count(value) and (_is_count(old) or early) and value != old
                # Who hooks into modules notes that it has, and would do it again.
                flag = isinstance(value, bool) and early and value != old and hooks == _hooks(model)
                if not (counts or flag or _holds_fakes(value)):
                    continue
                if old is _MISSING:
                    del holder[key]
                else:
                    holder[key] = old
                if early or counts:
                    now = "none" if old is _MISSING else repr(old)[:40].partition("\n")[0]
                    remarks.append(_remark(label, key, now))
        for remark in remarks:
            warnings.warn(remark, stacklevel=6)


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
    """Whether a container came to hold what is to be taken back."""
    now, then = (list(v.values() if isinstance(v, dict) else v) for v in (value, before))
    old = {id(item) for item in then}
    new = [item for item in now if id(item) not in old]
    if any(_holds_fakes(item) for item in new):
        return True
    return len(now) == len(then) and any(_is_count(item) for item in new)


def _refill(value: Any, before: Any) -> None:
    value.clear()
    if isinstance(value, list | deque):
        value.extend(before)
    else:
        value.update(before)


def _holds_fakes(value: Any) -> bool:
    return any(isinstance(leaf, FakeTensor) or type(leaf) is LateNumber for leaf in pytree.tree_leaves(value))


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and type(value) not in (bool, LateNumber)


@contextmanager
def assigned_buffers_written(model: nn.Module, assigned_names: set[str]) -> Iterator[None]:
    """Within, a buffer that is assigned a new tensor has, at the end, the new values written into the old one.

    Args:
        model: the user's module.
        assigned_names: gets the names of these buffers, and no others.

    Raises:
        RequestError: the new tensor has another shape or dtype.
    """
    before = [
        (name, module, key, buffer)
        for name, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]
    assigned_names.clear()
    yield
    written: list[tuple[Tensor, Tensor]] = []
    for name, module, key, buffer in before:
        assigned: Any = module._buffers.get(key)
        if assigned is buffer:
            continue
        path = f"{name}.{key}" if name else key
        if not isinstance(assigned, Tensor) or (assigned.shape, assigned.dtype) != (buffer.shape, buffer.dtype):
            what = f"{assigned.dtype} {tuple(assigned.shape)}" if isinstance(assigned, Tensor) else repr(assigned)
            raise RequestError(
                f"the step assigns {what} to buffer '{path}', which is {buffer.dtype} {tuple(buffer.shape)}: "
                "a buffer keeps its shape and dtype; allocate it large enough"
            )
        assigned_names.add(path)
        written.append((buffer, assigned.detach()))  # before any is written: it may be another buffer's old value
        module._buffers[key] = buffer
    for buffer, value in written:
        buffer.copy_(value)
