"""The errors that panpipe raises on purpose, and the exit status each one becomes.

Every message is one line that names the value, the rule it breaks and the fix.
"""

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, UnionType
from typing import Any, ParamSpec, Self, TypeVar

from .wording import value_text

P = ParamSpec("P")
T = TypeVar("T")


class PanpipeError(Exception):
    """A failure that panpipe raises itself. Exit status 1.

    It is sent to another process as its message and its `details`, from which that process builds it again.
    """

    exit_status = 1

    def details(self) -> dict[str, Any]:
        """Its data other than the message, as JSON values."""
        return {}

    @classmethod
    def with_details(cls, message: str, details: Mapping[str, Any]) -> Self:
        """The same error from its message and details."""
        return cls(message)


class RequestError(PanpipeError):
    """The request is wrong: the message names the value, the rule and the fix. Exit status 2."""

    exit_status = 2


class InfeasibleError(PanpipeError):
    """No plan satisfies the limits: the message names the binding constraint. Exit status 3."""

    exit_status = 3


class WorkerError(PanpipeError):
    """A worker of a running pipeline stopped: the message names its rank and the reason. Exit status 1.

    Args:
        message: one line.
        suspects: the ranks of which one stopped, if the transport does not report which.

    Attributes:
        lost: the ranks that a transport lost, of which at least one stopped; empty if no transport failed.
    """

    def __init__(self, message: str, suspects: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.suspects = self.lost = tuple(suspects)

    @classmethod
    def stopped_answering(cls, ranks: Sequence[int], why: object) -> Self:
        """The error for a rank that is lost, or for one of several where the transport does not report which."""
        if len(ranks) == 1:
            found = cls(f"rank {ranks[0]} stopped answering: {why}")
            found.lost = tuple(ranks)
            return found
        return cls(f"one of ranks {', '.join(map(str, ranks))} stopped answering: {why}", ranks)

    def details(self) -> dict[str, Any]:
        return {"suspects": list(self.suspects)}

    @classmethod
    def with_details(cls, message: str, details: Mapping[str, Any]) -> Self:
        return cls(message, suspects=details["suspects"])


class NonFiniteError(PanpipeError):
    """The loss of a step is NaN or infinite: the message names the stage and the microbatch. Exit status 1.

    Args:
        message: one line.
        step: number of the step, from 1.
        stage: the first stage with such an output; None if no output of a stage shows it.
        microbatch: its microbatch; None if no microbatch shows it.
        replica: their replica.
    """

    def __init__(
        self, message: str, step: int, stage: int | None = None, microbatch: int | None = None, replica: int = 0
    ) -> None:
        super().__init__(message)
        self.step, self.stage, self.microbatch, self.replica = step, stage, microbatch, replica

    def details(self) -> dict[str, Any]:
        return {"step": self.step, "stage": self.stage, "microbatch": self.microbatch, "replica": self.replica}

    @classmethod
    def with_details(cls, message: str, details: Mapping[str, Any]) -> Self:
        return cls(message, details["step"], details["stage"], details["microbatch"], details["replica"])


class OffloadError(PanpipeError):
    """A copy of saved tensors to the host or back failed: the message has the reason. Exit status 1."""


def without_own_frames(function: Callable[P, T]) -> Callable[P, T]:
    """A public function whose refusals have a traceback of the caller's frames alone: the message names value, rule and
    fix. With the environment variable ``PANPIPE_TRACEBACK`` tracebacks are whole."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (RequestError, InfeasibleError) as error:
            if os.environ.get("PANPIPE_TRACEBACK"):
                raise
            raise error.with_traceback(None) from None

    return call


_CALLERS = {"accelerate", "importlib", "lightning", "peft", "pytorch_lightning", "torch", "transformers"}
"""Packages that call panpipe for the user, whose lines no warning names."""


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the line of the user's code that called panpipe, directly or through a library."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    packages = [str(each.f_globals.get("__name__")).partition(".")[0] for each in frames]
    entered = max(i for i, package in enumerate(packages) if package == packages[0])
    users = (i for i in range(entered + 1, len(frames)) if packages[i] not in _CALLERS)
    found = frames[next(users, entered)]
    registry = found.f_globals.setdefault("__warningregistry__", {})
    name = found.f_globals.get("__name__")
    warnings.warn_explicit(message, category, found.f_code.co_filename, found.f_lineno, name, registry)


def refuse_other_kinds(name: str, value: object, kinds: type | UnionType | tuple[type, ...], fix: str) -> None:
    """Refuse an argument of another type.

    Args:
        name: of the argument.
        value: it.
        kinds: types that it may have.
        fix: what to give, after "give".

    Raises:
        RequestError: it has none of these types.
    """
    if not isinstance(value, kinds):
        raise RequestError(f"{name} is {value_text(value)}: give {fix}")


def refuse_no_bool(**given: object) -> None:
    """Refuse values of arguments that are neither True nor False, such as ``"no"``, which Python takes as True."""
    for name, value in given.items():
        refuse_other_kinds(name, value, bool, "True or False")


def message_of(failure: BaseException) -> str:
    """The message of any exception; if its ``__str__`` raises, a text that names that error."""
    try:
        return str(failure)
    except Exception as error:
        return f"(its message raised {type(error).__name__})"


def described(failure: BaseException) -> str:
    """The class, message and notes of any exception: ``IndexError: Target 9 is out of bounds (at train.py:8)``."""
    notes = getattr(failure, "__notes__", ())
    return f"{type(failure).__name__}: {message_of(failure)}{''.join(f' ({note})' for note in notes)}"


@contextmanager
def naming(*files: object) -> Iterator[None]:
    """Begin the message of a request's error with the files that it is about, unless it names one of them."""
    try:
        yield
    except RequestError as error:
        names = [str(file) for file in files]
        if names and not any(name in str(error) for name in names):
            error.args = (f"{' and '.join(names)}: {error}", *error.args[1:])
        raise


MOST_PRINTED = 10_000
"""Characters of an error message that are printed."""


def printed(error: PanpipeError) -> str:
    """An error's message for a terminal: texts from files in it may have control characters, or any length.

    It is one line; that of an `InfeasibleError` may have a table below.
    """
    message, more = str(error), "\n" if isinstance(error, InfeasibleError) else ""
    text = "".join(
        letter
        if letter.isprintable() or letter == more
        else " "
        if letter.isspace()
        else letter.encode("unicode_escape").decode()
        for letter in message[:MOST_PRINTED]
    )
    return text if len(message) <= MOST_PRINTED else f"{text}… ({len(message)} characters)"


def in_a_line(failure: BaseException) -> str:
    """Another library's exception as one line, for use in a message: ``ValueError: too many values``."""
    return " ".join(described(failure).split())
