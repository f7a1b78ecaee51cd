"""Removes branches on a tensor's value of which one side only raises an error, such as assertions, from captured steps.

`assert x.isfinite().all()`, `if labels.max() >= classes: raise ...`, and the argument checks of `torch.distributions`
branch on a value, and one side raises. A captured step has no value there: it takes the other side, and the check is
removed, as those of `torch._check` are (see `graph/rewrites`).
"""

import dis
import functools
import sys
import warnings
from itertools import pairwise
from types import CodeType, FrameType

import torch
from torch import nn

from .code_origin import is_own, is_user_code
from .user_lines import CALLS_STEP

_PASSED_THROUGH = {torch.overrides.__file__, torch._tensor.__file__}
_SKIPPED = ("CACHE", "TO_BOOL", "COPY_FREE_VARS", "NOP", "NOT_TAKEN", "PRECALL", "EXTENDED_ARG", "RESUME")
"""Instructions between a value and the jump that depends on it, and instructions that do nothing."""
_ENDS = ("RETURN", "YIELD", "FOR_ITER", "SEND", "JUMP", "POP_JUMP", "RERAISE")
"""Prefixes of instructions that end straight-line code without raising a new error."""


def value_without_error(started: bool = False) -> bool | None:
    """The value of a condition with which no error is raised; called while Python evaluates ``bool(value)``.

    Args:
        started: whether the model has computed something. Then a check outside of all modules, as of the loss, stays
            Python, together with the rest of the step, which is short.

    Returns:
        None if the condition decides about more than an error, or if the check stays Python.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (is_own(frame.f_code.co_filename) or frame.f_code.co_filename in _PASSED_THROUGH):
        frame = frame.f_back
    found = None if frame is None else _branch(frame.f_code, frame.f_lasti)
    if frame is not None and found is not None and started and is_user_code(frame.f_code.co_filename):
        caller: FrameType | None = frame
        while caller is not None and not isinstance(caller.f_locals.get("self"), nn.Module):
            caller = None if caller.f_code.co_filename.endswith(CALLS_STEP) else caller.f_back
        if caller is None:
            return None
    if frame is not None and found is not None and is_user_code(frame.f_code.co_filename):
        warnings.warn_explicit(
            "this check needs the value of a tensor, and nothing else depends on it: a pipeline does not run it",
            UserWarning, frame.f_code.co_filename, frame.f_lineno,
        )  # fmt: skip
    return found


@functools.lru_cache(maxsize=1 << 12)
def _branch(code: CodeType, offset: int) -> bool | None:
    """The condition under which the branch at an instruction does not raise; None unless exactly one side raises."""
    if any(entry.start <= offset < entry.end for entry in dis._parse_exception_table(code)):  # type: ignore[attr-defined]
        return None  # in a ``try`` or ``with``: the error may be caught
    instructions = list(dis.get_instructions(code))
    at = next(i for i, found in enumerate(instructions) if found.offset == offset)
    negated = False
    while instructions[at].opname.startswith(("CALL", "PRECALL")):  # bool(x), any(...), all(...)
        at += 1
    while instructions[at].opname in (*_SKIPPED, "UNARY_NOT"):
        negated ^= instructions[at].opname == "UNARY_NOT"
        at += 1
    jump = instructions[at]
    if not jump.opname.startswith("POP_JUMP") or not jump.opname.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    jumps_if = jump.opname.endswith("IF_TRUE") != negated
    target = next(i for i, found in enumerate(instructions) if found.offset == jump.argval)
    on_jump, on_fall = _raises(instructions[target:]), _raises(instructions[at + 1 :])
    if on_jump == on_fall:
        return None
    return jumps_if if on_fall else not jumps_if


def _raises(instructions: list[dis.Instruction]) -> bool:
    """Whether some instructions only raise an error, by ``raise`` or by ``torch._assert(False, ...)``."""
    for found, after in pairwise(instructions):
        if found.argval == "_assert" and after.opname == "LOAD_CONST" and after.argval is False:
            return True
        if found.opname.startswith(("RAISE_VARARGS", *_ENDS)):
            return found.opname == "RAISE_VARARGS"
    return bool(instructions) and instructions[-1].opname == "RAISE_VARARGS"
