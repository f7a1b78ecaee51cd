"""Values in a text that are known when a step is over: a mark stands for each, and is replaced then.

A mark holds the number of the value and how it is written: a Python number with its format, or a tensor of one element,
which looks as one process shows it, gradient function included.
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, _tensor_str, nn

MARK = "\x00"
"""Stands around the number of a late value in a text, and how it is written."""

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
    return f"{MARK}{number}{kind}:{spec}{MARK}"


def tensor_mark(number: int, tensor: Tensor) -> str:
    """The mark of a tensor of one element.

    Args:
        number: of the value.
        tensor: as it is while the step is captured.
    """
    function = type(tensor.grad_fn).__name__
    if function == "CppFunction":
        function = str(tensor.grad_fn.name()).rpartition("::")[2]  # type: ignore[union-attr]
    gradient = f"grad_fn=<{function}>" if tensor.grad_fn is not None else "requires_grad=True"
    before = "Parameter containing:\n" if isinstance(tensor, nn.Parameter) else ""
    shape = ",".join(map(str, tensor.shape))
    parts = (str(tensor.dtype).removeprefix("torch."), shape, gradient if tensor.requires_grad else "", before)
    return f"{MARK}{number}{_TENSOR}:{'|'.join(parts)}{MARK}"


def filled_in(text: str, values: Sequence[float]) -> str:
    """A text with values in the place of their marks.

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
    """A tensor as torch shows it."""
    dtype, shape, gradient, before = how.split("|")
    sizes = [int(size) for size in shape.split(",") if size]
    text = repr(torch.tensor(value, dtype=getattr(torch, dtype)).reshape(sizes))
    if gradient:
        indent = len("tensor(")
        text = _tensor_str._add_suffixes(text[:-1], [gradient], indent, force_newline=False)
    return before + text
