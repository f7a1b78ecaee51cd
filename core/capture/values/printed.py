"""What a step prints and logs: shown once, when it is captured, since its Python runs only then.

A capture may run a step several times, so texts are held back until it has succeeded. Values of tensors are not known
then: a number reads as ``nan``. A part of a step that stays Python prints when it runs.
"""

import builtins
import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

from .code_origin import is_users_own
from .late_numbers import LateNumber
from .user_lines import calling_line, warn_at

_ONCE = (
    "the step prints or logs here: the Python of a captured step runs only once, so this is shown once, now, and "
    "numbers of tensors as nan; return metrics to see the values of each step"
)

Held = dict[str, list[Callable[[], None]]]
"""The user's line → what prints or logs there."""


@contextmanager
def output_held() -> Iterator[Held]:
    """Within this context, what the user's code prints and logs in this thread is held back."""
    held: Held = {}
    show, handle, thread = builtins.print, logging.Logger.handle, threading.get_ident()

    def note_print(*values: Any, **options: Any) -> None:
        if options.get("file") not in (None, sys.stdout, sys.stderr) or threading.get_ident() != thread:
            show(*values, **options)
            return
        texts = [str(value) for value in values]
        held.setdefault(calling_line(sys._getframe(1)), []).append(partial(show, *texts, **options))

    def note_log(logger: logging.Logger, record: logging.LogRecord) -> None:
        if not is_users_own(record.pathname) or threading.get_ident() != thread:  # a library's own message
            handle(logger, record)
            return
        if isinstance(record.args, tuple):
            record.args = tuple(math.nan if isinstance(value, LateNumber) else value for value in record.args)
        try:
            record.msg = record.getMessage()
        except (TypeError, ValueError):  # as for %d
            record.msg = str(record.msg)
        record.args = None
        held.setdefault(f"{record.pathname}:{record.lineno}", []).append(partial(handle, logger, record))

    patched = mock.patch.object(builtins, "print", note_print)
    with patched, mock.patch.object(logging.Logger, "handle", note_log):
        yield held


def show_held(held: Held) -> None:
    """Print and log what was held back, with a warning for each line."""
    for line, texts in held.items():
        for show in texts:
            show()
        warn_at(line, _ONCE)
