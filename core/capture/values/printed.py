"""The printed and logged output of a step: recorded during capture, and printed for each microbatch at its end."""

import builtins
import io
import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from attrs import define, field

from .code_origin import is_users_own
from .late_numbers import LateNumber
from .text_marks import MARK, filled_in, plain


@define(eq=False)
class Printed:
    """What one run of a step prints and logs.

    Args:
        lines: functions that print or log one message each, from the values of late numbers.
    """

    lines: list[Callable[[Sequence[float]], None]] = field(factory=list)

    def emit(self, values: Sequence[float]) -> None:
        """Print and log everything, with the values of late numbers, by number."""
        for line in self.lines:
            line(values)


def printing_to_own(is_outside: Callable[[Any], bool], otherwise: Callable[..., None]) -> Callable[..., None]:
    """A ``print`` that writes to text in memory which the step itself created, because the step may read it.

    Args:
        is_outside: whether an object exists before the step runs.
        otherwise: called for other prints.
    """
    show, begun = builtins.print, (sys.stdout, sys.stderr)

    def printed(*values: Any, **options: Any) -> None:
        stream = options.get("file") or sys.stdout
        own = isinstance(stream, io.StringIO) and stream not in begun and not is_outside(stream)
        (show if own else otherwise)(*values, **options)

    return printed


@contextmanager
def output_recorded(is_outside: Callable[[Any], bool]) -> Iterator[Printed]:
    """Within this context, what Python prints and logs is recorded instead.

    Args:
        is_outside: whether an object exists before the step runs.
    """
    printed = Printed()
    show, handle = builtins.print, logging.Logger.handle

    def note_print(*values: Any, **options: Any) -> None:
        texts = [plain(value) for value in values]

        def emit(known: Sequence[float]) -> None:
            if not getattr(options.get("file"), "closed", False):  # one that the step itself opened
                show(*(filled_in(text, known) for text in texts), **options)

        printed.lines.append(emit)

    note = printing_to_own(is_outside, note_print)

    def note_log(logger: logging.Logger, record: logging.LogRecord) -> None:
        text = _message(record)
        if MARK not in text and not is_users_own(record.pathname):
            handle(logger, record)  # a library's own message, the same each time
            return
        record.msg, record.args = text, None

        def emit(known: Sequence[float]) -> None:
            again = logging.makeLogRecord({**record.__dict__, "msg": filled_in(text, known)})
            handle(logger, again)

        printed.lines.append(emit)

    with mock.patch.object(builtins, "print", note), mock.patch.object(logging.Logger, "handle", note_log):
        yield printed


_SPEC = re.compile(r"%([-+ #0]*)(\d*)(\.\d+)?([a-zA-Z%])")


def _message(record: logging.LogRecord) -> str:
    """A record's text, without ``%`` formatting of late numbers, which would need their values."""
    if not isinstance(record.args, tuple) or not any(isinstance(value, LateNumber) for value in record.args):
        return plain(record.getMessage())
    values = iter(record.args)

    def text(found: re.Match[str]) -> str:
        flags, width, digits, kind = found.groups()
        if kind == "%":
            return "%"
        value = next(values)
        if not isinstance(value, LateNumber):
            return found.group() % value
        if kind in "diu" and value.tensor.is_floating_point():
            value = LateNumber(value.tensor.trunc().long(), value.watch)
        return format(value, _format_spec(flags, width, digits or "", kind, value.tensor.dtype == torch.bool))

    return _SPEC.sub(text, str(record.msg))


def _format_spec(flags: str, width: str, digits: str, kind: str, is_bool: bool) -> str:
    """The format specification of a number that is equal to a ``%`` conversion.

    Args:
        flags, width, digits, kind: of the conversion.
        is_bool: whether the number is a bool, which has a width as an integer only.
    """
    align = "<" if "-" in flags else ""
    if kind in "rsa":
        return f"{align or '>'}{width}" if width and not is_bool else ""
    if kind in "diu":
        kind, digits = "d", ""
    sign = "+" if "+" in flags else " " if " " in flags else ""
    zero = "0" if "0" in flags and not align else ""
    return f"{align}{sign}{'#' if '#' in flags else ''}{zero}{width}{digits}{kind}"
