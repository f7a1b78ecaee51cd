"""The rank that hosts the job's store waits until the other ranks have read why the job ends."""

import time
from collections.abc import Iterable
from typing import Any

from .lost_ranks import Heartbeats

LINGER_S = 5.0
"""Most seconds that a failed rank that hosts the store waits, so that the others can read the reason."""
_POLL_S = 0.1


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
