"""Records a run of a step: operators with their arguments, files that it reads, calls that ask for a state.

Arguments are compared by shapes, numbers and the origins of tensors.
"""

import sys
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ...errors import RequestError
from ..python.foreign_state import foreign_state_noted
from ..python.opened_files import looked_for, opened_otherwise
from ..values.user_lines import calling_line
from .constant_values import ConstantValues, digest_of_values
from .kept_tensors import KeptTensors
from .operand_origins import Operands

READS_FILE = "reads a file"
"""An entry of a run for a file that is read or looked for, which is not an operator."""
ASKS = "asks for a state"
"""The first part of an entry of a run for a read of a state that cannot be compared; the second one is its object."""


@frozen
class RecordedOperator:
    """One operator of a run.

    Args:
        what: its name, with the shapes, origins and numbers of its arguments.
        line: the user's.
    """

    what: Hashable
    line: str


class Recording(TorchDispatchMode):
    """A mode that records operators.

    Args:
        kept: records the tensors that they compute.
        operands: the tensors that the run starts with.
        values: if given, constants are compared by their values, and operators of constants alone are not recorded.

    Attributes:
        ran: the operators.
        read_kept: the user's line of the first operator that reads a tensor of an earlier run, or "".
    """

    def __init__(self, kept: KeptTensors, operands: Operands, values: ConstantValues | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran: list[RecordedOperator] = []
        self.read_kept = ""
        self._kept, self._operands, self._values = kept, operands, values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Operators of ``prim`` read a device or layout, which a fake tensor caches. A number that ``item()`` reads has
        # no effect alone, and a step may print it in some steps only.
        if func.namespace == "prim" or func is torch.ops.aten._local_scalar_dense.default:
            return func(*args, **kwargs)
        depends = self._kept.depends(func, (args, kwargs))
        if depends or self._values is None:
            given = tuple(map(self._comparable, pytree.tree_leaves((args, kwargs))))
            self.ran.append(RecordedOperator((str(func), given), calling_line(sys._getframe(1))))
        if not self.read_kept and self._kept.read((args, kwargs)):
            self.read_kept = calling_line(sys._getframe(1)) or "the step"
        self._kept.note_written(func, (args, kwargs))
        result = func(*args, **kwargs)
        if depends or self._values is None:
            self._operands.note(len(self.ran), result)
        if depends:
            self._kept.note(func, (args, kwargs), result)
        elif self._values is not None:
            self._values.compute(func, args, kwargs, result)
        return result

    def _comparable(self, leaf: Any) -> Hashable:
        """A key that is equal for equal arguments; tensors that are not fake are compared by their values."""
        if isinstance(leaf, Tensor) and self._values is not None and self._kept.is_constant(leaf):
            return self._values.constant(leaf)
        if isinstance(leaf, FakeTensor) or (isinstance(leaf, Tensor) and leaf.is_meta):
            return tuple(leaf.shape), leaf.dtype, self._operands.origin(leaf)
        if isinstance(leaf, Tensor):
            return tuple(leaf.shape), leaf.dtype, _digest(leaf)
        return repr(leaf) if isinstance(leaf, int | float | complex | str | type(None)) else type(leaf).__name__


def _digest(tensor: Tensor) -> int:
    """32 bits over a tensor's values; 0 for a tensor whose values cannot be read."""
    with _disable_current_modes(), suppress(Exception):
        return digest_of_values(tensor)
    return 0


@contextmanager
def outside_noted(ran: list[RecordedOperator], objects: Sequence[Any]) -> Iterator[None]:
    """A context in which reads of what is outside of the process's Python objects are recorded: files that the user's
    code opens for reading or looks for, and states that cannot be compared.

    Args:
        ran: the record.
        objects: that have such a state.
    """

    def opens(mode: str, line: str, _logs: bool) -> None:
        if not set(mode) & set("wax+"):
            ran.append(RecordedOperator(READS_FILE, line))

    def asks(line: str, what: str) -> None:
        ran.append(RecordedOperator((ASKS, what), line))

    looks = looked_for(lambda line: ran.append(RecordedOperator(READS_FILE, line)))
    with opened_otherwise(opens), looks, foreign_state_noted(objects, asks):
        yield


def refuse_outside(ran: Sequence[RecordedOperator]) -> None:
    """Refuse a run that reads a file, or asks for a state that cannot be compared.

    Raises:
        RequestError: it does; the message has the line.
    """
    for one in ran:
        if one.what == READS_FILE:
            raise refusal_of(one, "it reads a file, or looks for one", "once the file has changed")
        if isinstance(one.what, tuple) and one.what[0] == ASKS:
            raise refusal_of(one, f"it calls {one.what[1]}, whose state cannot be compared", "once that has changed")


def first_difference(one: list[RecordedOperator], other: list[RecordedOperator]) -> RecordedOperator | None:
    """The first operator of the second run that differs from the first run's; None if the runs are equal."""
    for mine, theirs in zip(one, other, strict=False):
        if mine.what != theirs.what:
            return theirs
    longer = max(one, other, key=len)
    return None if len(one) == len(other) else longer[min(len(one), len(other))]


def cause_in(changed: Sequence[str]) -> str:
    """The cause of a difference between runs, from the places that the step changes."""
    return f"it changes '{changed[0]}'" if changed else "it reads an iterator, a clock or another state"


def refusal_of(found: RecordedOperator, cause: str, when: str) -> RequestError:
    """The refusal of a step with two different runs.

    Args:
        found: the first operator that differs.
        cause: as text.
        when: when it differs, as text.
    """
    return RequestError(
        f"{found.line or 'the step'}: the step computes something else here {when} ({cause}), but the Python of a "
        "captured step runs only once; give the value with the batch as a tensor, make it a buffer of the model, or "
        "change it between steps"
    )


def read_kept_refusal(line: str, changed: Sequence[str]) -> RequestError:
    """The refusal of a step that reads a tensor of an earlier step.

    Args:
        line: the user's.
        changed: the places that the step changes.
    """
    what = f" (it changes '{changed[0]}')" if changed else ""
    return RequestError(
        f"{line}: the step reads a tensor here that an earlier step computed and Python kept{what}, but the "
        "Python of a captured step runs only once; keep it in a buffer of the model"
    )
