"""What the ranks publish in the job's store, which of them are lost, and the texts of the reasons.

Every rank writes its position twice a second, so a document that stays the same is that of a silent rank::

    what is seen                                        what it shows
    a failure that a rank raised itself                 it stops, for this reason
    the end of a process of this host                   that rank's process ended
    a transport's failure                               a rank stopped answering; of a sum, one of several ranks did
    documents that change                               which of several is silent
    positions (`positions`)                             a rank makes no progress, or has left
    the end of the store                                its host stopped, unless it left before

A rank is named as lost if it is known to be. Where a transport suspects several, the silent ones among them are.

A call of a store whose host has ended raises a ``RuntimeError``, which panpipe turns into a line. torch also logs each
such call as a warning with a C++ backtrace, on standard error. So warnings are off while ranks are watched; errors are
still logged. torch reads its log level at each message, and has no function to set it: it is a variable of its
library ``c10``.
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ...backends.gloo import lost
from ...core.errors import WorkerError, message_of
from .failure import shortened, stopped
from .positions import Position

FAILURE_KEY = "failure"
"""The key of the reason for which all ranks stop."""
_LINGER_S = 5.0
"""Most seconds that a failed rank that hosts the store waits, so that the others can read the reason. A fixed wait of
one second is not enough: a rank that got no processor time in it found no store, and reported its host as dead."""
_POLL_S = 0.1
_SILENCE_S = 3.0
"""Seconds without a new document after which a rank counts as dead, once another rank has failed."""


def uses_agent_store() -> bool:
    """Whether ``torchrun`` hosts the job's store; otherwise rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def hosts_store(rank: int) -> bool:
    """Whether the job's store ends with this rank."""
    return rank == 0 and not uses_agent_store()


def position_key(rank: int) -> str:
    """The key of a rank's position; it is there as soon as the rank has arrived."""
    return f"position/{rank}"


def documents(store: Any, ranks: Sequence[int]) -> dict[int, bytes]:
    """The positions that ranks have published last; all must have arrived."""
    found = store.multi_get([position_key(rank) for rank in ranks]) if ranks else []
    return dict(zip(ranks, found, strict=True))


def _waited_for(store: Any, ranks: Sequence[int], seconds: float, done: Callable[[bytes, bool], bool]) -> list[int]:
    """Wait until something holds for every rank.

    Args:
        seconds: most to wait.
        done: called with a rank's document, and with whether it has changed meanwhile.

    Returns:
        Those for which it does not hold.
    """
    first, deadline = documents(store, ranks), time.monotonic() + seconds
    missing = list(ranks)
    while True:
        now = documents(store, missing)
        missing = [rank for rank in missing if not done(now[rank], now[rank] != first[rank])]
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(_POLL_S)


def silent(store: Any, ranks: Sequence[int]) -> list[int]:
    """The ranks that publish nothing for `_SILENCE_S`; returns at once when all have published."""
    return _waited_for(store, ranks, _SILENCE_S, lambda document, changed: changed)


def linger(store: Any, ranks: Sequence[int]) -> None:
    """Wait until these ranks know the reason, have left or are silent, at most `_LINGER_S`."""
    begun = time.monotonic()

    def done(document: bytes, changed: bool) -> bool:
        position = Position.of_document(document)
        dead = not changed and time.monotonic() - begun > _SILENCE_S
        return dead or position.stops or position.left is not None

    _waited_for(store, ranks, _LINGER_S, done)


def numbered(ranks: Sequence[int]) -> str:
    """Ranks in words: ``rank 1``, ``ranks 1, 2``."""
    return ("ranks " if len(ranks) > 1 else "rank ") + ", ".join(map(str, ranks))


def reason_of(failure: BaseException, rank: int, others: Sequence[int], store: Any) -> str:
    """Why all ranks stop after a failure on this one: which ranks are lost, or what this one raised."""
    if isinstance(failure, WorkerError):
        suspects: Sequence[int] = failure.suspects
    else:
        # A collective fails if another rank died, without that rank's number.
        suspects = others if isinstance(failure, RuntimeError) else ()
    dead = silent(store, suspects)
    cause = failure.__cause__ if isinstance(failure, WorkerError) and failure.__cause__ is not None else failure
    if dead:
        return shortened(f"{numbered(dead)} stopped answering: {lost(cause)}")
    if isinstance(failure, WorkerError):
        return shortened(message_of(failure))
    if isinstance(failure, RuntimeError) and lost(failure) != " ".join(message_of(failure).split()):
        return f"{numbered(others)} stopped answering rank {rank}: {lost(failure)}"
    return stopped(rank, failure)


def left_early(left: Mapping[int, str], waiting: int, where: str) -> str:
    """The reason if ranks closed their pipelines while this one waits for them.

    Args:
        left: rank → the reason.
        where: the action or phase in which it waits.
    """
    each = "; ".join(f"rank {rank} has closed its pipeline{why}" for rank, why in left.items())
    return (
        f"{each}; rank {waiting} waits for it {where}: every rank of a pipeline must take the same batches and call "
        "the same methods in the same order"
    )


def not_arrived(ranks: Sequence[int], size: int, timeout_s: float) -> str:
    """The reason if ranks do not join the job in time."""
    return (
        f"{numbered(ranks)} of {size} did not arrive within {timeout_s:g} s: every rank must call panpipe.pipeline "
        "with the same arguments; see what it does, or why it stopped"
    )


def process_ended(rank: int) -> str:
    """The reason if a rank's process ended without leaving."""
    return f"{numbered([rank])} stopped answering: its process ended"


def store_ended() -> str:
    """The reason if the host of the store stopped."""
    if uses_agent_store():
        return "the process that started the job stopped: its store is gone"
    return "rank 0 stopped: the job's store, which it hosts, is gone"


_USERS_OWN = "TORCH_CPP_LOG_LEVEL"
"""A user who sets this variable gets the level that it names, including warnings."""
_ERROR = 2
"""torch's number of the level: INFO 0, WARNING 1, ERROR 2, FATAL 3."""
_ANSWER = timedelta(seconds=5)
"""Most time that a call waits for a key."""


_levels: list[int] = []
"""The level before each context of `without_torch_warnings` that is open, the user's first."""
_lock = threading.Lock()


@contextmanager
def without_torch_warnings() -> Iterator[None]:
    """A context in which torch logs no warning; contexts of several threads may overlap."""
    level = _level()
    if level is None:
        yield
        return
    with _lock:
        _levels.append(level.value)
        level.value = max(level.value, _ERROR)
    try:
        yield
    finally:
        with _lock:
            before = _levels.pop()
            if not _levels:
                level.value = before


@cache
def _level() -> ctypes.c_int | None:
    """The level's variable; None if the user has set the level, or if this build of torch has no such variable."""
    if _USERS_OWN in os.environ:
        return None
    name = {"linux": "libc10.so", "darwin": "libc10.dylib", "win32": "c10.dll"}.get(sys.platform, "")
    with suppress(OSError, ValueError):
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
        return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    return None


def own_connection(store: Any) -> Any:
    """A thread's own connection to the job's store; its methods raise ``RuntimeError`` once the store has ended."""
    own = store.clone() if hasattr(store, "clone") else store
    own.set_timeout(_ANSWER)
    return own
