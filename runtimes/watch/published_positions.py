"""The positions of all ranks in the job's store: each rank writes its own, and those that wait read the others."""

import threading
import time
from collections.abc import Sequence
from typing import Any

from attrs import evolve

from .activity import QuietTime
from .positions import UNKNOWN, Position

_SMALL = 16
"""Ranks of a job in which every rank reads the positions of all at each look."""
_AFTER_S = 5.0
"""Seconds of waiting after which a rank of a larger job reads them."""


class PublishedPositions:
    """The positions of the ranks of one meeting.

    Args:
        rank: this rank.
        size: how many there are.
        timeout_s: the limit on waiting.
    """

    def __init__(self, rank: int, size: int, timeout_s: float) -> None:
        self._keys = {other: f"panpipe/position/{other}" for other in range(size)}
        self._rank = rank
        self.timeout_s = timeout_s
        self._every_s = 0.0 if size <= _SMALL else size / 100  # the ranks read size² keys in this time
        self._next = 0.0
        self._lock = threading.Lock()
        self._there: set[int] = set()
        self._found: dict[int, Position] = {}
        self._silent: dict[int, QuietTime] = {}

    def write(self, store: Any, own: Position, beat: int) -> None:
        """Publish this rank's position."""
        store.set(self._keys[self._rank], own.document(beat))

    def end(self, store: Any, why: str) -> None:
        """Publish that this rank has closed its pipeline."""
        store.set(self._keys[self._rank], Position("", left=why).document(0))

    def reads(self, own: Position) -> bool:
        """Whether this rank reads the other positions now: if it has waited for a while, and in small jobs always."""
        now = time.monotonic()
        if now < self._next or (self._every_s and (not own.on or own.quiet_s < min(self.timeout_s / 4, _AFTER_S))):
            return False
        self._next = now + self._every_s
        return True

    def host(self, store: Any) -> Position:
        """The position of rank 0, or UNKNOWN."""
        return self._one(store, 0)

    def _one(self, store: Any, rank: int) -> Position:
        if rank not in self._there:
            if not store.check([self._keys[rank]]):
                return UNKNOWN
            self._there.add(rank)
        return Position.of_document(store.get(self._keys[rank]))

    def read(self, store: Any, own: Position) -> dict[int, Position]:
        """The positions of all ranks, with this rank's own.

        How long a rank gave no sign of life is measured between calls; until the second one it is 0.
        """
        with self._lock:
            return self._read(store, own)

    def _read(self, store: Any, own: Position) -> dict[int, Position]:
        missing = [rank for rank in self._keys if rank not in self._there and rank != self._rank]
        self._there.update(rank for rank in missing if store.check([self._keys[rank]]))
        known = [rank for rank in self._keys if rank in self._there and rank != self._rank]
        documents = (
            dict(zip(known, store.multi_get([self._keys[rank] for rank in known]), strict=True)) if known else {}
        )
        found = {self._rank: own}
        for rank in self._keys:
            if rank == self._rank:
                continue
            silent = self._silent.setdefault(rank, QuietTime(max(2.0, 4 * self._every_s)))
            silent_s = silent.update(documents.get(rank))
            position = Position.of_document(documents[rank]) if rank in documents else UNKNOWN
            found[rank] = evolve(position, silent_s=silent_s)
        return found

    def absent(self, store: Any, ranks: Sequence[int]) -> list[int]:
        """Those of some ranks that have published no position: they are not connected yet."""
        return [rank for rank in ranks if self._one(store, rank) == UNKNOWN]

    def left(self, store: Any, ranks: Sequence[int]) -> dict[int, str]:
        """Those of some ranks that have closed their pipelines, with the reason."""
        found = {rank: self._one(store, rank).left for rank in ranks if rank in self._keys}
        return {rank: why for rank, why in found.items() if why is not None}
