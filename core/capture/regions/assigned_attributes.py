"""Attributes that a region's module assigns and that code outside of it reads, such as a router's loss.

A copy of the module runs, so its assignments do not reach the module. Assigned tensors are returned with its results,
and assigned to the captured module. A module that changes other values which are read outside of it is refused.
"""

import copy
import types
from typing import Any

from torch import nn

from ...errors import RequestError
from ..python.holders import CONTAINERS, INTERNAL
from ..python.reachable.code_names import line_in
from ..python.reached import Reached
from ..values.nesting import tensors_of

_NOT_ASSIGNED = {*INTERNAL, "forward", "training"}
"""Attributes that are not compared: capture replaces them, or compares them elsewhere."""
_MISSING = object()


def values_of_attributes(module: nn.Module, assigned: tuple[tuple[str, str], ...]) -> tuple[Any, ...]:
    """The present values of attributes, given as (module, name); None for an attribute that does not exist."""
    return tuple(vars(module.get_submodule(path)).get(key) for path, key in assigned)


class AttributesBefore:
    """The attributes of a module before a call.

    Args:
        who: the module's name, with the user's line.
        module: the module.
        reached: what the step reaches.
    """

    def __init__(self, who: str, module: nn.Module, reached: Reached) -> None:
        self._who, self._module, self._reached = who, module, reached
        self._before = {
            (path, key): (value, copy.copy(value) if type(value) in CONTAINERS else None)
            for path, one in module.named_modules()
            for key, value in vars(one).items()
            if key not in _NOT_ASSIGNED
        }

    def found(self) -> tuple[tuple[str, str], ...]:
        """Attributes with assigned tensors that code outside of the module reads, as (module, name).

        Raises:
            RequestError: the call changed another attribute that code outside of the module reads.
        """
        found: list[tuple[str, str]] = []
        for path, one in self._module.named_modules():
            for key, value in list(vars(one).items()):
                if key in _NOT_ASSIGNED:
                    continue
                old, contents = self._before.get((path, key), (_MISSING, None))
                assigned = value is not old
                if assigned and tensors_of(value) and self._line_outside(key):
                    found.append((path, key))
                elif self._changed(value, old, contents) and (line := self._line_outside(key)):
                    raise RequestError(
                        f"{self._who} changes its attribute '{key}', which is read at {line}, and stays Python: "
                        "return it from its forward as a tensor"
                    )
        return tuple(found)

    @staticmethod
    def _changed(value: Any, old: Any, contents: Any) -> bool:
        """Whether a number changed, or the contents of a container."""
        if isinstance(value, int | float):
            return value is not old and value != old
        if value is not old or contents is None:
            return False
        now, then = (list(v.values() if isinstance(v, dict) else v) for v in (value, contents))
        return len(now) != len(then) or any(a is not b for a, b in zip(now, then, strict=True))

    def _line_outside(self, key: str) -> str | None:
        """The first line outside of the module's code that names an attribute; None if there is none."""
        own = {
            code
            for one in self._module.modules()
            for kind in type(one).__mro__
            for member in vars(kind).values()
            if isinstance(code := getattr(member, "__code__", None), types.CodeType)
        }
        for code in self._reached.codes:
            if code not in own and (line := line_in(code, key)) is not None:
                return f"{code.co_filename}:{line}"
        return None
