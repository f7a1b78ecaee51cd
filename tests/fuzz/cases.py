"""One case: a mutated file, used as a user would use it, with limits of time and memory."""

import contextlib
import io
import json
import os
import resource
import signal
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from attrs import frozen
from panpipe.core.errors import PanpipeError

from .formats import formats

SECONDS = 10
"""Limit of one case, of processor time: another process may use the machine, too."""
MEMORY_BYTES = 1 << 30
"""Limit of one case, above what the process has when it starts."""
STATUSES = (0, 2, 3)
"""Exit statuses of a command that reads a file: done, the request is wrong, infeasible."""


@frozen
class Outcome:
    """What a case ended with.

    Args:
        kind: ``accepted``, ``refused``, ``infeasible``, or a fault: ``traceback``, ``hang``, ``memory``, ``message``
            (of several lines, or without the file's name), ``status``, ``not JSON``.
        text: the error's line, or the end of the traceback.
    """

    kind: str
    text: str = ""

    @property
    def is_fault(self) -> bool:
        return self.kind not in ("accepted", "refused", "infeasible")


class TooLong(BaseException):
    """The case took longer than its limit."""


def case_of(format_name: str, seed: int, index: int) -> tuple[bytes, int]:
    """The mutated file of a case, and the number of its use."""
    random = Random(f"{format_name} {seed} {index}")
    form = formats()[format_name]
    data = form.mutated(random)
    return data, random.randrange(len(form.uses))


def run_case(format_name: str, seed: int, index: int, folder: Path) -> Outcome:
    """Run a case in this process.

    Args:
        format_name: of `formats`.
        seed, index: the case is the same for the same numbers.
        folder: with the valid files (`write_valid`); the mutated file is written below it.
    """
    data, use = case_of(format_name, seed, index)
    below = folder / "mutated"
    below.mkdir(exist_ok=True)
    file = below / format_name
    file.write_bytes(data)
    (below / "valid.safetensors").write_bytes(formats()["weights.safetensors"].valid)
    return run_use(format_name, use, file, folder)


def run_use(format_name: str, use: int, file: Path, folder: Path, seconds: float = SECONDS) -> Outcome:
    """Use a file, and judge how that ends."""
    out, errors = io.StringIO(), io.StringIO()
    try:
        with (
            _within_limit(seconds), contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors),
            warnings.catch_warnings(action="error"),
        ):  # fmt: skip
            status = formats()[format_name].uses[use](file, folder)
    except PanpipeError as error:
        return _refusal(3 if error.exit_status == 3 else 2, f"panpipe: {error}", file, lines=1)
    except TooLong:
        return Outcome("hang", f"more than {seconds} s")
    except MemoryError:
        return Outcome("memory", "MemoryError")
    except BaseException:
        return Outcome("traceback", traceback.format_exc(limit=-6))
    return _checked_output(out.getvalue()) if status == 0 else _refusal(status, errors.getvalue(), file)


def _refusal(status: int, printed: str, file: Path, lines: int | None = None) -> Outcome:
    """Judge an error: one line, with the file's name unless what it holds is well formed and does not fit.

    Args:
        status: the exit status.
        printed: notes and warnings of any length, then the error.
        file: the mutated file.
        lines: how many lines there are; None for any number.
    """
    if status not in STATUSES:
        return Outcome("status", f"{status}: {printed[-2000:]}")
    found = [line for line in printed.splitlines() if status != 3 or line.startswith("panpipe: ")]  # without a table
    last = found[-1] if found and lines in (None, len(found)) else ""
    named = file.name in printed or status == 3 or file.name == "question.json"  # sent; no file
    if not last.startswith("panpipe: ") or len(last) > 5000 or not named:
        return Outcome("message", printed[-2000:])
    return Outcome("infeasible" if status == 3 else "refused", last)


def _checked_output(text: str) -> Outcome:
    """Output of ``--json`` must be JSON, without NaN and Infinity. A report for people may begin with any text."""
    if text.startswith("{\n"):
        try:
            json.loads(text, parse_constant=_refuse)
        except ValueError as error:
            return Outcome("not JSON", str(error))
    return Outcome("accepted")


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} in the output")


@contextlib.contextmanager
def _within_limit(seconds: float) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TooLong

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def limit_memory() -> None:
    """Limit this process to `MEMORY_BYTES` more than it has."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    size = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
