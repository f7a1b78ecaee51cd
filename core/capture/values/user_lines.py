"""The user's lines: the place in the user's code that an operator or an error comes from.

Lines of model libraries count as the user's; see `code_origin`.
"""

import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest import mock

from torch import fx
from torch.fx.proxy import TracerBase

from .code_origin import is_user_code


def error_chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, its cause, the cause of that, and so on: an explicit cause, or the error handled when it was raised."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def user_line(error: BaseException | None) -> str:
    """The deepest line of the user's own code in an error's traceback, or ""."""
    found = ""
    for link in error_chain(error):
        trace = link.__traceback__
        while trace is not None:
            code = trace.tb_frame.f_code
            if is_user_code(code.co_filename):
                found = f"{code.co_filename}:{trace.tb_lineno} in {code.co_name}"
            trace = trace.tb_next
    return found


def raised_by_user(error: BaseException) -> bool:
    """Whether a line of the user's code itself raised an error, as ``assert`` and ``raise`` do."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and is_user_code(trace.tb_frame.f_code.co_filename)


def calling_line(frame: FrameType | None) -> str:
    """The innermost line of the user's among a frame and those that called it; "" without any."""
    while frame is not None and not is_user_code(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def message_start(line: str) -> str:
    """A line as the start of a message: ``train.py:12: ``; "" for no line."""
    return f"{line}: " if line else ""


def current_line() -> str:
    """The user's line that is running now, as the start of a message; "" without any."""
    return message_start(calling_line(sys._getframe(1)))


def first_line(step: Any) -> str:
    """The first line of a function; "" if it is not known."""
    code = getattr(step, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


def line_of(node: fx.Node) -> str:
    """The innermost line of the user's that a node of a captured graph comes from; "" if none is known."""
    return last_place(node.meta.get("stack_trace") or "")


def last_place(stack_trace: str) -> str:
    """The innermost line of the user's in the text of a stack trace; "" if it has none."""
    places = re.findall(r'File "([^"]+)", line (\d+)', stack_trace)
    return next((f"{file}:{line}" for file, line in reversed(places) if is_user_code(file)), "")


_warned: dict[Any, Any] = {}
"""The registry with which Python shows each warning once."""


def warn_at(line: str, message: str) -> None:
    """Warn with the user's line as the warning's place.

    Args:
        line: file and line, such as "train.py:12"; without a line number, only the message is shown.
        message: of the warning.
    """
    file, _, number = line.partition(" in ")[0].rpartition(":")
    warnings.warn_explicit(
        message, UserWarning, file or line, int(number) if number.isdecimal() else 0, registry=_warned
    )


CALLS_STEP = os.path.join("capture", "regions", "breaks.py")
"""The end of the path of the file that calls a step; lines before it called panpipe."""


@contextmanager
def lines_recorded() -> Iterator[None]:
    """Within this context captured operators record all lines of the user's; export alone records only those of
    functions named forward."""

    def users(_tracer: Any, frames: traceback.StackSummary) -> traceback.StackSummary:
        begins = max((i for i, frame in enumerate(frames) if frame.filename.endswith(CALLS_STEP)), default=0)
        return traceback.StackSummary.from_list([frame for frame in frames[begins:] if is_user_code(frame.filename)])

    with mock.patch.object(TracerBase, "_filter_traceback_frames", users):
        yield


def reason_of(error: BaseException) -> str:
    """An error's message in one line; an internal error of torch is reported as such."""
    text = str(error).strip().replace("'LateNumber'", "a number that is read from a tensor")
    if "INTERNAL ASSERT FAILED" in text:
        text = re.sub(r".*please report a bug to PyTorch\.?\s*", "", text, flags=re.DOTALL).strip()
        reason = next(iter(text.splitlines()), "")
        return f"torch fails internally ({reason[:200]})" if reason else "torch fails internally"
    if "data pointer of Tensor" in text:
        return (
            "Python reads the memory of a tensor, as copy.deepcopy, .numpy() and .data_ptr() do, and a captured tensor "
            "has none"
        )
    first = next(iter(text.splitlines()), "")
    return f"{type(error).__name__}: {first[:300]}" if first else type(error).__name__
