"""Holders: objects that store Python values under names (modules, functions, globals), and the containers in them."""

import copy
from collections import defaultdict, deque
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from typing import Any

from torch import nn

INTERNAL = {"_parameters", "_buffers", "_modules"}
"""Attributes of modules that hold their parameters, buffers and submodules."""
CONTAINERS = (list, dict, set, deque, defaultdict)
"""Classes of containers whose contents are compared and restored."""
STEP = "the step"
"""Name of the step as a holder."""

Holder = tuple[str, MutableMapping[str, Any]]
"""The name of an object for messages, and the values that it keeps under names."""


def step_holders(step: Any) -> list[Holder]:
    """The holders of a step outside of the model: its own object, the variables around it, and its globals."""
    found: list[Holder] = []
    owner = getattr(step, "__self__", None)
    function = getattr(step, "__func__", step)
    if owner is not None and not isinstance(owner, nn.Module) and hasattr(owner, "__dict__"):
        found.append(("the step's object", _Variables(owner.__dict__, list(owner.__dict__))))
    code = getattr(function, "__code__", None)
    if code is not None:
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        found.append((STEP, _Cells(cells)))
        found.append((STEP, _Variables(function.__globals__, list(code.co_names))))
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


def number_of_forward_hooks(model: nn.Module) -> int:
    """The number of hooks on the forwards of a model's modules."""
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def contents_of(holder: MutableMapping[str, Any]) -> dict[str, Any]:
    """Copies of the lists, dicts and sets of a holder, without torch's own."""
    return {key: copy.copy(value) for key, value in holder.items() if key not in INTERNAL and type(value) in CONTAINERS}


def refill(value: Any, before: Any) -> None:
    """Replace a container's contents by its earlier ones."""
    value.clear()
    if isinstance(value, list | deque):
        value.extend(before)
    else:
        value.update(before)


def has_entries(value: Any, before: Any) -> bool:
    """Whether a container has its earlier entries."""
    if len(value) != len(before):
        return False
    if isinstance(value, dict):
        return all(key in value and value[key] is item for key, item in before.items())
    if isinstance(value, set):
        return bool(value == before)
    return all(one is other for one, other in zip(value, before, strict=True))
