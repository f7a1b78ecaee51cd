"""Removes branches on a tensor's value of which one side only raises an error, such as assertions, from captured steps.

`assert x.isfinite().all()`, `if labels.max() >= classes: raise ...`, and the argument checks of `torch.distributions`
branch on a value, and one side raises. A captured step has no value there: it takes the other side, and the check is
removed, as those of `torch._check` are (see `graph/value_checks`).
"""

import dis
import functools
import sys
import warnings
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import nn

from .code_origin import is_own, is_user_code

_PASSED_THROUGH = {torch.overrides.__file__, torch._tensor.__file__}
_RUN_STEPS = {str(Path(__file__).parents[1] / name) for name in ("regions/breaks.py", "batch/row_trace.py")}
"""Files of the functions that run a user's step."""
_SKIPPED = ("CACHE", "TO_BOOL", "COPY_FREE_VARS", "NOP", "NOT_TAKEN", "PRECALL", "EXTENDED_ARG", "RESUME")
"""Instructions between a value and the jump that depends on it, and instructions that do nothing."""
_ENDS = ("RETURN", "YIELD", "FOR_ITER", "SEND", "JUMP", "POP_JUMP", "RERAISE")
"""Prefixes of instructions that end straight-line code without raising a new error."""


def value_without_error(started: bool) -> bool | None:
    """The value of a condition with which no error is raised; called while Python evaluates ``bool(value)``.

    Args:
        started: whether the model has computed something. Then a check outside of all modules can stay Python, together
            with the rest of the step, which is short.

    Returns:
        None if the condition decides about more than an error, if the error would be caught, or if the check can stay
        Python.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (is_own(frame.f_code.co_filename) or frame.f_code.co_filename in _PASSED_THROUGH):
        frame = frame.f_back
    if frame is None:
        return None
    found = _branch(frame.f_code, frame.f_lasti)
    callers = _user_frames(frame)
    if found is None or any(_handled(caller.f_code, caller.f_lasti) for caller in callers):
        return None
    file = frame.f_code.co_filename
    in_module = any(isinstance(caller.f_locals.get("self"), nn.Module) for caller in callers)
    if is_user_code(file) and started and not in_module:
        return None
    if is_user_code(file):
        warnings.warn_explicit(
            "this check needs the value of a tensor, and nothing else depends on it: a pipeline does not run it",
            UserWarning, file, frame.f_lineno,
        )  # fmt: skip
    return found


@functools.lru_cache(maxsize=1 << 12)
def _branch(code: CodeType, offset: int) -> bool | None:
    """The condition under which the branch at an instruction does not raise; None unless exactly one side raises."""
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
    on_jump, on_fall = _raises(code, instructions, target), _raises(code, instructions, at + 1)
    if on_jump == on_fall:
        return None
    return jumps_if if on_fall else not jumps_if


def _raises(code: CodeType, instructions: list[dis.Instruction], start: int) -> bool:
    """Whether the code from ``start`` only raises an error that the function does not catch."""
    for found in instructions[start:]:
        if found.opname == "RAISE_VARARGS":
            return not _handled(code, found.offset)
        if found.opname.startswith(_ENDS):
            return False
    return False


@functools.lru_cache(maxsize=1 << 12)
def _handled(code: CodeType, offset: int) -> bool:
    """Whether an instruction is in a ``try`` with ``except`` or ``finally``; ``with`` does not count."""
    instructions = {found.offset: found for found in dis.get_instructions(code)}
    for entry in dis._parse_exception_table(code):  # type: ignore[attr-defined]
        if entry.start <= offset < entry.end:
            following = (instructions[o].opname for o in sorted(instructions) if o > entry.target)
            if next((name for name in following if name not in _SKIPPED), "") != "WITH_EXCEPT_START":
                return True
    return False


def _user_frames(frame: FrameType | None) -> list[FrameType]:
    """This frame and its callers in the user's step, without those that called panpipe."""
    found: list[FrameType] = []
    while frame is not None and frame.f_code.co_filename not in _RUN_STEPS:
        if is_user_code(frame.f_code.co_filename):
            found.append(frame)
        frame = frame.f_back
    return found
