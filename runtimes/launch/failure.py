"""Failures as data: what one rank raised, so that others can raise it too.

Ranks exchange text and no objects: an exception of the user's may not survive pickling, and reading one runs code. A
failure travels as a JSON document with the family of its class, its message, its exit status, and what the family
carries besides, such as the plan that comes closest::

    rank 0 raises NothingFits  ──▶  {"family": "NothingFits", "message": …}  ──▶  rank 1 raises NothingFits

An error that is none of panpipe's own becomes a `WorkerError` that names the rank, the class and the message.
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ...core.errors import InfeasibleError, PanpipeError, RequestError, WorkerError, message_of
from ...core.search.suggestions.infeasible import NothingFits

FAMILIES: Mapping[str, type[PanpipeError]] = MappingProxyType(
    {each.__name__: each for each in (NothingFits, InfeasibleError, RequestError, WorkerError, PanpipeError)}
)
"""The classes that a failure may arrive as, derived ones first. An error of another class arrives as the first
that it is derived from."""
LIMIT = 1 << 20
"""Characters of a message that travel; what is longer is cut, and says so."""
LINE_LIMIT = 4096
"""Characters of a reason that every rank prints."""


def encoded(failure: BaseException, rank: int) -> str:
    """A failure as a JSON document.

    Args:
        failure: any exception; of its causes nothing travels.
        rank: that raised it.
    """
    for family in FAMILIES.values() if isinstance(failure, PanpipeError) else ():  # derived ones come first
        if isinstance(failure, family):
            try:
                details = family.details(failure)  # the family's own: the class may be anybody's
                return _document(family.__name__, message_of(failure), failure.exit_status, details)
            except Exception:  # it never set what its family carries
                continue
    return encoded(WorkerError(stopped(rank, failure, LIMIT)), rank)


def _document(family: str, message: str, exit_status: int, details: Mapping[str, Any]) -> str:
    return json.dumps(
        {"family": family, "message": shortened(message, LIMIT), "exit_status": int(exit_status), "details": details}
    )


def decoded(document: str) -> PanpipeError:
    """The error that a document describes, to be raised.

    Raises:
        WorkerError: it describes none.
    """
    try:
        given = json.loads(document)
        failure = FAMILIES[given["family"]].with_details(given["message"], given["details"])
        if failure.exit_status != given["exit_status"]:
            failure.exit_status = int(given["exit_status"])
    except (ValueError, TypeError, KeyError, PanpipeError) as error:
        raise WorkerError(
            f"a rank sent a failure that cannot be read ({message_of(error)}): every rank runs the same version of "
            "panpipe"
        ) from error
    return failure


def stopped(rank: int, failure: BaseException, limit: int = LINE_LIMIT) -> str:
    """The reason why all stop where one rank raised."""
    return shortened(f"rank {rank} stopped: {type(failure).__name__}: {message_of(failure)}", limit)


def shortened(text: str, limit: int = LINE_LIMIT) -> str:
    """The text cut to at most ``limit`` characters, which UTF-8 can write."""
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    end = f" … ({len(text)} characters)"
    return text if len(text) <= limit else text[: limit - len(end)] + end
