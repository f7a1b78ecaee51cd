"""Decides which ranks are lost, and writes the error's text. No other module decides it: `watch` collects and reports.

    what is seen                                        what it shows
    a failure that a rank raised itself                 it stops, for this reason
    the end of a process of this host (`processes`)     that rank's process ended
    a transport's failure                               a rank stopped answering; of a sum, one of several ranks did
    heartbeats in the job's store, twice a second       which of several is silent
    who arrived                                         a rank is absent; it may be alive
    positions (`positions`)                             a rank makes no progress, or has left
    the end of the store                                its host stopped, unless it left before

A rank is named as lost if it is known to be. Where a transport suspects several, the silent ones among them are.
"""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...backends.gloo import lost
from ...core.errors import WorkerError, message_of
from .failure import shortened, stopped

LINGER_S = 5.0
"""Most seconds that a failed rank that hosts the store waits, so that the others can read the reason."""
_POLL_S = 0.1
_SILENCE_S = 3.0
"""Seconds without a heartbeat after which a rank counts as dead, once another rank has failed."""


def uses_agent_store() -> bool:
    """Whether ``torchrun`` hosts the job's store; otherwise rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def hosts_store(rank: int) -> bool:
    """Whether the job's store ends with this rank."""
    return rank == 0 and not uses_agent_store()


def numbered(ranks: Sequence[int]) -> str:
    """Ranks in words: ``rank 1``, ``ranks 1, 2``."""
    return ("ranks " if len(ranks) > 1 else "rank ") + ", ".join(map(str, ranks))


def reason_of(failure: BaseException, rank: int, others: Sequence[int], store: Any) -> str:
    """Why all ranks stop after a failure on this one: which ranks are lost, or what this one raised.

    Args:
        failure: what this rank raised.
        rank: this rank.
        others: all others.
        store: the job's, with the heartbeats.
    """
    if isinstance(failure, WorkerError):
        suspects: Sequence[int] = failure.suspects
    else:
        # A collective fails if another rank died, without that rank's number.
        suspects = others if isinstance(failure, RuntimeError) else ()
    silent = Heartbeats(store, suspects).silent() if suspects else []
    cause = failure.__cause__ if isinstance(failure, WorkerError) and failure.__cause__ is not None else failure
    if silent:
        return shortened(f"{numbered(silent)} stopped answering: {lost(cause)}")
    if isinstance(failure, WorkerError):
        return shortened(message_of(failure))
    if isinstance(failure, RuntimeError) and lost(failure) != " ".join(message_of(failure).split()):
        return f"{numbered(others)} stopped answering rank {rank}: {lost(failure)}"
    return stopped(rank, failure)


def left_early(left: Mapping[int, str], waiting: int, where: str) -> str:
    """The reason if ranks closed their pipelines while this one waits for them.

    Args:
        left: rank → the reason.
        waiting: this rank.
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


def beat(store: Any, rank: int) -> int:
    """Send a heartbeat of a rank; returns the number of heartbeats that it has sent."""
    return int(store.add(_beat_key(rank), 1))


def _beat_key(rank: int) -> str:
    return f"panpipe/beat/{rank}"


class Heartbeats:
    """The heartbeats of some ranks from now on.

    Args:
        store: the job's.
        ranks: the ranks that are observed.
    """

    def __init__(self, store: Any, ranks: Iterable[int]) -> None:
        self._store = store
        now = time.monotonic()
        self._last = {rank: (self._count(rank), now) for rank in ranks}
        self._first = dict(self._last)

    def _count(self, rank: int) -> int:
        return int(self._store.add(_beat_key(rank), 0))

    def _look(self) -> None:
        now = time.monotonic()
        for rank, (count, _) in self._last.items():
            found = self._count(rank)
            if found != count:
                self._last[rank] = found, now

    def not_silent(self) -> list[int]:
        """Ranks with a heartbeat within the last `_SILENCE_S`; in the first `_SILENCE_S`, all."""
        self._look()
        now = time.monotonic()
        return [rank for rank, (_, heard) in self._last.items() if now - heard < _SILENCE_S]

    def silent(self) -> list[int]:
        """Ranks without a heartbeat for `_SILENCE_S`; returns at once when all have sent one."""
        deadline = time.monotonic() + _SILENCE_S
        while True:
            self._look()
            missing = [rank for rank, heard in self._last.items() if heard == self._first[rank]]
            if not missing or time.monotonic() > deadline:
                return missing
            time.sleep(_POLL_S)


def acknowledge(store: Any, rank: int) -> None:
    """Record that this rank has read the reason."""
    store.set(_read_key(rank), "")


def linger(store: Any, ranks: Iterable[int]) -> None:
    """Wait until these ranks have read the reason or are silent, at most `LINGER_S`.

    A fixed wait of one second is not enough: a rank that got no CPU time in it found no store, and reported its host as
    dead.
    """
    beats, deadline = Heartbeats(store, ranks), time.monotonic() + LINGER_S
    while time.monotonic() < deadline and any(not store.check([_read_key(rank)]) for rank in beats.not_silent()):
        time.sleep(_POLL_S)


def _read_key(rank: int) -> str:
    return f"panpipe/read/{rank}"
