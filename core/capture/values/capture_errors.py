"""Errors that stop the capture of a step, and what an error says about values of tensors."""

from typing import TypeVar

from torch import Tensor

from .user_lines import error_chain


class NeedsValue(Exception):
    """Python needs the value of a captured tensor, or something else that a captured graph does not have."""


class NeedsAutograd(NeedsValue):
    """Python computes gradients within the step."""


class Refused(Exception):
    """The step does something that neither a captured graph nor a region supports."""


class LateSize(RuntimeError):
    """A captured tensor has a data-dependent size.

    Args:
        message: what has it.
        module: name of the innermost module that contains it, "" for the model itself.
    """

    def __init__(self, message: str, module: str) -> None:
        super().__init__(message)
        self.module = module


class WritesTensor(Exception):
    """The step writes, or a module assigns anew, a tensor that is neither a parameter nor a buffer.

    Args:
        tensor: the tensor, or a view of it.
        line: of the user's, that writes it; "" if it is not known.
        assigned: whether a module assigns it anew.
    """

    def __init__(self, tensor: Tensor, line: str, assigned: bool = False) -> None:
        super().__init__(line)
        self.tensor, self.line, self.assigned = tensor, line, assigned


_NEEDS_VALUE = (
    "data-dependent", "unbacked", "got FakeTensor", "data is not allocated", "LateNumber",
    "type float is not JSON serializable", "type int is not JSON serializable",
)  # fmt: skip
"""Parts of the messages of errors that are raised where a value is needed."""


E = TypeVar("E", bound=BaseException)


def error_of_type(kind: type[E], error: BaseException | None) -> E | None:
    """The first error of a type in an error's chain."""
    return next((link for link in error_chain(error) if isinstance(link, kind)), None)


def depends_on_value(error: BaseException | None) -> bool:
    """Whether an error means that something needs a tensor's value."""
    return any(
        isinstance(link, NeedsValue)
        or any(part in type(link).__name__ for part in ("DataDependent", "DynamicOutputShape"))
        or any(part in str(link) for part in _NEEDS_VALUE)
        for link in error_chain(error)
    )
