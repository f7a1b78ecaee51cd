"""Marks in a text in place of values that are not known before the end of a step, and their replacement.

A mark has the number of the value and its format: a Python number with its format specification, or a tensor of one
element, which is formatted as in one process, with its gradient function.
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, _tensor_str, nn

from .capture_errors import NeedsValue

MARK = "\x00"
"""Delimits the number and the format of a late value in a text."""

_NUMBERS: dict[str, Any] = {"f": float, "i": int, "b": bool}
_TENSOR = "t"
_MARKED = re.compile(f"{MARK}([0-9]+)([fibt]):([^{MARK}]*){MARK}")
"""A whole mark: MARK alone may be part of what the user writes."""


def number_mark(number: int, dtype: torch.dtype, spec: str) -> str:
    """The mark of a Python number.

    Args:
        number: of the value.
        dtype: of the tensor that it will be read from.
        spec: its format.
    """
    kind = "f" if dtype.is_floating_point else "b" if dtype == torch.bool else "i"
    return UnknownText(f"{MARK}{number}{kind}:{spec}{MARK}")


def tensor_mark(number: int, tensor: Tensor) -> str:
    """The mark of a tensor of one element.

    Args:
        number: of the value.
        tensor: the captured tensor.
    """
    function = type(tensor.grad_fn).__name__
    if function == "CppFunction":
        function = str(tensor.grad_fn.name()).rpartition("::")[2]  # type: ignore[union-attr]
    gradient = f"grad_fn=<{function}>" if tensor.grad_fn is not None else "requires_grad=True"
    before = "Parameter containing:\n" if isinstance(tensor, nn.Parameter) else ""
    shape = ",".join(map(str, tensor.shape))
    parts = (str(tensor.dtype).removeprefix("torch."), shape, gradient if tensor.requires_grad else "", before)
    return UnknownText(f"{MARK}{number}{_TENSOR}:{'|'.join(parts)}{MARK}")


_PLAIN = {"__init__", "__new__", "__str__", "__repr__", "__class__", "__getattribute__", "__setattr__", "__doc__",
          "__init_subclass__", "__subclasshook__", "__dir__", "__sizeof__", "__delattr__", "__reduce__"}  # fmt: skip
"""Methods of `str` that do not depend on the characters of a text, or are defined below."""


class UnknownText(str):
    """A text of one value that is not known: it can be written and joined, and every other use of it stops the capture.

    Python joins it to a plain text in an f-string with other parts, and in ``%`` and ``format``: uses of such a text
    are detected where they change what a trial run with other values computes (``export/repeatability``).
    """

    __slots__ = ()

    def stops(self, use: str) -> Any:
        """Stop, because something needs the characters of the text.

        Args:
            use: the name of the method.
        """
        raise NeedsValue(f"{use} of a text needs the value of a tensor that is written there")

    def joined(self, text: str) -> str:
        """A text that contains this one."""
        return type(self)(text)

    def __str__(self) -> str:
        return self

    def __repr__(self) -> str:
        return f"{str.__str__(self)!r}"

    def __format__(self, spec: str) -> str:
        return self if spec in ("", "s") else self.stops("the width")

    def __bool__(self) -> bool:
        return True

    def __add__(self, other: Any) -> str:
        return self.joined(str.__add__(self, other)) if isinstance(other, str) else NotImplemented

    def __rmod__(self, other: Any) -> str:
        return self.joined(other % str.__str__(self)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> str:
        return self.joined(str.__add__(other, self)) if isinstance(other, str) else NotImplemented


def _stopping(name: str) -> Any:
    def method(self: UnknownText, *_others: Any, **_options: Any) -> Any:
        return self.stops(name.strip("_"))

    return method


for _name in dir(str):
    if _name not in vars(UnknownText) and _name not in _PLAIN and callable(getattr(str, _name)):
        setattr(UnknownText, _name, _stopping(_name))
for _name in ("__hash__", "__eq__", "__ne__"):  # a class that compares has no hash of its own
    setattr(UnknownText, _name, _stopping(_name))


def plain(text: Any) -> str:
    """A text as a plain `str`."""
    return str.__str__(str(text))


def filled_in(text: str, values: Sequence[float]) -> str:
    """A text with its marks replaced by values.

    Args:
        text: as the step wrote it.
        values: by number.
    """

    def value_of(mark: re.Match[str]) -> str:
        number, kind, how = mark.groups()
        value = values[int(number)]
        return _shown(value, how) if kind == _TENSOR else format(_NUMBERS[kind](value), how)

    return _MARKED.sub(value_of, text)


def _shown(value: float, how: str) -> str:
    """A tensor as torch prints it."""
    dtype, shape, gradient, before = how.split("|")
    sizes = [int(size) for size in shape.split(",") if size]
    text = repr(torch.tensor(value, dtype=getattr(torch, dtype)).reshape(sizes))
    if gradient:
        indent = len("tensor(")
        text = _tensor_str._add_suffixes(text[:-1], [gradient], indent, force_newline=False)
    return before + text
