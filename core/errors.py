"""The errors that panpipe raises on purpose, and the exit status each one becomes.

Every message is one line that names the value, the rule it breaks and the fix.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self


class PanpipeError(Exception):
    """A failure that panpipe understands. Exit status 1.

    Another process that raises it, too, makes it from its message and its `details`.
    """

    exit_status = 1

    def details(self) -> dict[str, Any]:
        """What it carries besides its message, as JSON can write it."""
        return {}

    @classmethod
    def with_details(cls, message: str, details: Mapping[str, Any]) -> Self:
        """The same error from its message and details."""
        return cls(message)


class RequestError(PanpipeError):
    """What was asked for is wrong: the message names the value, the rule and the fix. Exit status 2."""

    exit_status = 2


class InfeasibleError(PanpipeError):
    """No plan satisfies the limits: the message names the binding constraint. Exit status 3."""

    exit_status = 3


class WorkerError(PanpipeError):
    """A worker of a running pipeline stopped: the message names its rank and the reason. Exit status 1.

    Args:
        message: the line.
        suspects: the ranks of which one stopped, where the transport does not tell which.
    """

    def __init__(self, message: str, suspects: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.suspects = tuple(suspects)

    @classmethod
    def stopped_answering(cls, ranks: Sequence[int], why: object) -> Self:
        """The error for a rank that is lost, or for one of several where the transport does not report which."""
        if len(ranks) == 1:
            return cls(f"rank {ranks[0]} stopped answering: {why}")
        return cls(f"one of ranks {', '.join(map(str, ranks))} stopped answering: {why}", ranks)

    def details(self) -> dict[str, Any]:
        return {"suspects": list(self.suspects)}

    @classmethod
    def with_details(cls, message: str, details: Mapping[str, Any]) -> Self:
        return cls(message, suspects=details["suspects"])


def message_of(failure: BaseException) -> str:
    """The message of an exception whoever wrote its class: one that cannot say its message still has its name."""
    try:
        return str(failure)
    except Exception as error:
        return f"(its message raised {type(error).__name__})"


def in_a_line(failure: BaseException) -> str:
    """A failure that others raised, to stand in such a message: ``ValueError: too many values``."""
    return " ".join(f"{type(failure).__name__}: {message_of(failure)}".split())
