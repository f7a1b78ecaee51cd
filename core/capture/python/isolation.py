"""Runs a step without side effects, for example to find shapes.

The step prints, warns and logs nothing. Afterwards modules, the values that its code names and the states of the random
number generators are as before.
"""

import contextlib
import io
import logging
import random
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import TextIO

import numpy
import torch
from torch import nn

from .changes import Changes, modules_restored


@contextlib.contextmanager
def isolated(model: nn.Module, changes: Changes) -> Iterator[None]:
    """The context of a run of a step without side effects.

    Args:
        model: the user's module.
        changes: of runs of the step.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_silent())
        stack.enter_context(_random_numbers_kept())
        stack.enter_context(modules_restored(model))
        stack.enter_context(contextlib.suppress(Exception))  # capture refuses side effects that are not allowed
        stack.enter_context(changes.outside(model))
        yield


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    disabled = logging.root.manager.disable
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(contextlib.redirect_stdout(_OtherThreads(sys.stdout)))
        stack.enter_context(contextlib.redirect_stderr(_OtherThreads(sys.stderr)))
        stack.callback(logging.disable, disabled)
        logging.disable(logging.CRITICAL)
        yield


class _OtherThreads(io.TextIOBase):
    """A stream that drops what this thread writes. Other threads write as before: one that watches the ranks of a job
    prints why it ends this process, perhaps now.

    Args:
        stream: what they write to; None as in a process without streams.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream, self._dropped = stream, threading.get_ident()

    def write(self, text: str) -> int:
        if self._stream is not None and threading.get_ident() != self._dropped:
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        if self._stream is not None and threading.get_ident() != self._dropped:
            self._stream.flush()

    def writable(self) -> bool:
        return True


@contextlib.contextmanager
def _random_numbers_kept() -> Iterator[None]:
    states = random.getstate(), numpy.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
