"""Whether Python asks for a tensor's value only to raise an error, as an assertion does.

`assert x.isfinite().all()`, `if labels.max() >= classes: raise ...`, and the argument checks of `torch.distributions`
branch on a value, and one of the two ways ends in an error. A captured step has no value there: it goes the other way,
and the check is left out, as those of `torch._check` are (see `checks`).
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
"""Instructions between a value that is asked for and the jump that asks, and ones that do nothing."""
_ENDS = ("RETURN", "YIELD", "FOR_ITER", "SEND", "JUMP", "POP_JUMP", "RERAISE")
"""Beginnings of names of instructions that leave a straight line of code otherwise than by raising."""


def value_without_error(started: bool) -> bool | None:
    """What the condition that asks for a value has to be, so that no error is raised.

    Called while Python evaluates ``bool(value)``.

    Args:
        started: whether the model has computed something. From then on a check outside of every module can stay
            Python, with what follows it: there is little of that at the end of a step.

    Returns:
        None where the condition decides about more than an error, or the error would be caught, or can stay.
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
            "this check needs the value of a tensor, and nothing else depends on it: a pipeline leaves it out",
            UserWarning, file, frame.f_lineno,
        )  # fmt: skip
    return found


@functools.cache
def _branch(code: CodeType, offset: int) -> bool | None:
    """The condition under which the branch at an instruction does not raise, where the other way does."""
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
    """Whether code from here on does nothing but raise an error that the function does not catch."""
    for found in instructions[start:]:
        if found.opname == "RAISE_VARARGS":
            return not _handled(code, found.offset)
        if found.opname.startswith(_ENDS):
            return False
    return False


@functools.cache
def _handled(code: CodeType, offset: int) -> bool:
    """Whether an ``except`` or ``finally`` of the function is around an instruction; ``with`` does not count."""
    instructions = {found.offset: found for found in dis.get_instructions(code)}
    for entry in dis._parse_exception_table(code):  # type: ignore[attr-defined]
        if entry.start <= offset < entry.end:
            following = (instructions[o].opname for o in sorted(instructions) if o > entry.target)
            if next((name for name in following if name not in _SKIPPED), "") != "WITH_EXCEPT_START":
                return True
    return False


def _user_frames(frame: FrameType | None) -> list[FrameType]:
    """This frame and those of the user's step that called it, but not what called panpipe."""
    found: list[FrameType] = []
    while frame is not None and frame.f_code.co_filename not in _RUN_STEPS:
        if is_user_code(frame.f_code.co_filename):
            found.append(frame)
        frame = frame.f_back
    return found
