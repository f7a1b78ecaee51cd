"""Failures as plain data, so that the error of one rank can be raised on all ranks.

Ranks exchange no exceptions: a user's may not survive pickling, and unpickling runs code. The data have the base class
of the error (its family), its message, its exit status, and further data of the family, such as the plan that is
closest to fitting::

    rank 0 raises NothingFits  ──▶  {"family": "NothingFits", "message": …}  ──▶  rank 1 raises NothingFits

An error of another class than panpipe's becomes a `WorkerError` that names the rank, the class and the message.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ...core.errors import (
    InfeasibleError,
    NonFiniteError,
    OffloadError,
    PanpipeError,
    RequestError,
    WorkerError,
    described,
    message_of,
)
from ...core.search.suggestions.infeasible import NothingFits

_CLASSES = NothingFits, InfeasibleError, RequestError, WorkerError, NonFiniteError, OffloadError, PanpipeError
FAMILIES: Mapping[str, type[PanpipeError]] = MappingProxyType({each.__name__: each for each in _CLASSES})
"""The classes of decoded failures, derived ones first. An error is encoded as the first class that it is an instance
of."""
LIMIT = 1 << 20
"""Most characters of an encoded message; a longer one is shortened, with its length at the end."""
LINE_LIMIT = 4096
"""Most characters of a reason that every rank prints."""


def encoded(failure: BaseException, rank: int) -> dict[str, Any]:
    """A failure as plain data; its causes are left out.

    Args:
        rank: the rank that raised it.
    """
    for name, family in FAMILIES.items() if isinstance(failure, PanpipeError) else ():
        if isinstance(failure, family):
            try:
                details = family.details(failure)  # the family's method: the class may be the user's
            except Exception:  # the error lacks the family's attributes
                continue
            message = shortened(message_of(failure), LIMIT)
            return {"family": name, "message": message, "exit_status": int(failure.exit_status), "details": details}
    return encoded(WorkerError(stopped(rank, failure, LIMIT)), rank)


def decoded(given: Mapping[str, Any]) -> PanpipeError:
    """The error of `encoded` data, to be raised."""
    failure = FAMILIES[given["family"]].with_details(given["message"], given["details"])
    failure.exit_status = given["exit_status"]
    return failure


def stopped(rank: int, failure: BaseException, limit: int = LINE_LIMIT) -> str:
    """The reason for all ranks to stop after an error on one rank."""
    return shortened(f"rank {rank} stopped: {described(failure)}", limit)


def shortened(text: str, limit: int = LINE_LIMIT) -> str:
    """The text cut to at most ``limit`` characters, which UTF-8 can write."""
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    end = f" … ({len(text)} characters)"
    return text if len(text) <= limit else text[: limit - len(end)] + end
