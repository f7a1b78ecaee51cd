"""Failures as JSON documents, so that the error of one rank can be raised on all ranks.

Ranks exchange text and no objects: a user's exception may not survive pickling, and unpickling runs code. The document
has the base class of the error (its family), its message, its exit status, and further data of the family, such as the
plan that is closest to fitting::

    rank 0 raises NothingFits  ──▶  {"family": "NothingFits", "message": …}  ──▶  rank 1 raises NothingFits

An error of another class than panpipe's becomes a `WorkerError` that names the rank, the class and the message.
"""

import json
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
from ...core.files.json_reader import parse_json
from ...core.files.limits import short
from ...core.search.suggestions.infeasible import NothingFits

FAMILIES: Mapping[str, type[PanpipeError]] = MappingProxyType(
    {
        each.__name__: each
        for each in (
            NothingFits,
            InfeasibleError,
            RequestError,
            WorkerError,
            NonFiniteError,
            OffloadError,
            PanpipeError,
        )
    }
)
"""The classes of decoded failures, derived ones first. An error is encoded as the first class that it is an instance
of."""
LIMIT = 1 << 20
"""Most characters of an encoded message; a longer one is shortened, with its length at the end."""
LINE_LIMIT = 4096
"""Most characters of a reason that every rank prints."""


def encoded(failure: BaseException, rank: int) -> str:
    """A failure as a JSON document.

    Args:
        failure: any exception; its causes are not encoded.
        rank: the rank that raised it.
    """
    for family in FAMILIES.values() if isinstance(failure, PanpipeError) else ():  # derived ones come first
        if isinstance(failure, family):
            try:
                details = family.details(failure)  # the family's method: the class may be the user's
                return _document(family.__name__, message_of(failure), failure.exit_status, details)
            except Exception:  # the error lacks the family's attributes
                continue
    return encoded(WorkerError(stopped(rank, failure, LIMIT)), rank)


def _document(family: str, message: str, exit_status: int, details: Mapping[str, Any]) -> str:
    return json.dumps(
        {"family": family, "message": shortened(message, LIMIT), "exit_status": int(exit_status), "details": details}
    )


def decoded(document: str) -> PanpipeError:
    """The error that a document describes, to be raised.

    Raises:
        WorkerError: the document is not valid.
    """
    try:
        given = parse_json(document, "the failure")
        failure = FAMILIES[given["family"]].with_details(given["message"], given["details"])
        status = given["exit_status"]
        if type(status) is not int:
            raise TypeError(f"the exit status is {short(status)}, not an integer")
        if failure.exit_status != status:
            failure.exit_status = status
    except (ValueError, TypeError, KeyError, PanpipeError) as error:
        raise WorkerError(
            f"a rank sent a failure that cannot be read ({shortened(message_of(error))}): all ranks must run the same "
            "version of panpipe"
        ) from error
    return failure


def stopped(rank: int, failure: BaseException, limit: int = LINE_LIMIT) -> str:
    """The reason for all ranks to stop after an error on one rank."""
    return shortened(f"rank {rank} stopped: {described(failure)}", limit)


def shortened(text: str, limit: int = LINE_LIMIT) -> str:
    """The text cut to at most ``limit`` characters, which UTF-8 can write."""
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    end = f" … ({len(text)} characters)"
    return text if len(text) <= limit else text[: limit - len(end)] + end
