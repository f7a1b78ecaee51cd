"""What a run of a step does: its operators, with the shapes and numbers given to them, and the files that it reads."""

import sys
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any
from zlib import crc32

import torch
from attrs import frozen
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import RequestError
from ..python.opened_files import opened_otherwise
from ..values.user_lines import calling_line
from .constant_values import ConstantValues
from .kept_tensors import KeptTensors

READS_FILE = "reads a file"
"""What a run does that is no operator."""


@frozen
class Ran:
    """One operator of a run.

    Args:
        what: its name, with the shapes and numbers given to it.
        line: of the user's.
    """

    what: Hashable
    line: str


class Recording(TorchDispatchMode):
    """Records the operators that run within.

    Args:
        kept: notes what they compute.
        values: where constants are compared by their values, and what computes constants alone is not recorded.

    Attributes:
        ran: the operators.
        read_kept: the user's line of the first one that reads what an earlier run computed, or "".
    """

    def __init__(self, kept: KeptTensors, values: ConstantValues | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran: list[Ran] = []
        self.read_kept = ""
        self._kept, self._values = kept, values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a device or a layout, which a fake tensor is asked for once
            return func(*args, **kwargs)
        depends = self._kept.depends(func, (args, kwargs))
        if depends or self._values is None:
            given = tuple(map(self._comparable, pytree.tree_leaves((args, kwargs))))
            self.ran.append(Ran((str(func), given), calling_line(sys._getframe(1))))
        if not self.read_kept and self._kept.read((args, kwargs)):
            self.read_kept = calling_line(sys._getframe(1)) or "the step"
        self._kept.note_written(func, (args, kwargs))
        result = func(*args, **kwargs)
        if depends:
            self._kept.note(func, (args, kwargs), result)
        elif self._values is not None:
            self._values.compute(func, args, kwargs, result)
        return result

    def _comparable(self, leaf: Any) -> Hashable:
        """What two leaves have in common that mean the same; a tensor that is no fake one has values."""
        if isinstance(leaf, Tensor) and self._values is not None and self._kept.is_constant(leaf):
            return self._values.constant(leaf)
        if isinstance(leaf, FakeTensor) or (isinstance(leaf, Tensor) and leaf.is_meta):
            return tuple(leaf.shape), leaf.dtype
        if isinstance(leaf, Tensor):
            return tuple(leaf.shape), leaf.dtype, _digest(leaf)
        return repr(leaf) if isinstance(leaf, int | float | complex | str | type(None)) else type(leaf).__name__


def _digest(tensor: Tensor) -> int:
    with torch.utils._python_dispatch._disable_current_modes(), suppress(Exception):
        return crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return 0


def files_noted(ran: list[Ran]) -> AbstractContextManager[None]:
    """Within, files that the user's code opens to read are noted."""

    def opens(mode: str, line: str) -> None:
        if not set(mode) & set("wax+"):
            ran.append(Ran(READS_FILE, line))

    return opened_otherwise(opens)


def first_difference(one: list[Ran], other: list[Ran]) -> Ran | None:
    """The first operator of a run that the other one does not have in its place; None where they are alike."""
    for mine, theirs in zip(one, other, strict=False):
        if mine.what != theirs.what:
            return theirs
    longer = max(one, other, key=len)
    return None if len(one) == len(other) else longer[min(len(one), len(other))]


def cause_in(changed: Sequence[str]) -> str:
    """Why a step does something else, from the places that it changes."""
    return f"it changes '{changed[0]}'" if changed else "it reads an iterator, a clock or another state"


def refusal_of(found: Ran, cause: str, when: str) -> RequestError:
    """The refusal of a step of which two runs differ.

    Args:
        found: the first operator that differs.
        cause: in words.
        when: it differs, in words.
    """
    return RequestError(
        f"{found.line or 'the step'}: the step computes something else here {when} ({cause}): captured, Python runs "
        "once; give it with the batch as a tensor, make it a buffer of the model, or change it between steps"
    )


def read_kept_refusal(line: str, changed: Sequence[str]) -> RequestError:
    """The refusal of a step that reads what an earlier one computed.

    Args:
        line: of the user's.
        changed: the places that the step changes.
    """
    what = f" (it changes '{changed[0]}')" if changed else ""
    return RequestError(
        f"{line}: the step reads a tensor here that an earlier step computed and Python kept{what}: captured, Python "
        "runs once; keep it in a buffer of the model"
    )
