"""Detects the death of another rank on this host before ranks are connected: while it captures its step.

Each rank listens on a Unix socket without a file, whose name has the address of the job's store and the rank's number,
and connects to those of the others as soon as they are there. When a process ends, the kernel closes its sockets, and
with them the connections. A rank sends its number. If it learns, here or from the job's store, that a rank has ended,
it sends that rank's number and ends itself; the others can then report which rank ended first::

    rank 1  listens as (host:port, 1) ◀── connected, "0" ── rank 0
            ── connected, "1" ──▶ listens as (host:port, 0)

Of two ranks the later one finds the earlier one, however soon it ends: if it has ended already, by the file that it
left (`presence_file`).

That needs no store. Linux alone has such sockets. Ranks of other hosts are seen from their connection to rank 0 on
(`peer_connections`).
"""

import hashlib
import os
import selectors
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakSet

from attrs import frozen

from .presence_file import NOBODY, PresenceFiles

_POLL_S = 0.1
_GRACE_S = 2.0
"""Seconds in which a process of the restarted job may replace one that ended."""
_AT_ONCE = 64
"""Most absent ranks that each poll searches."""
_CREDENTIALS = struct.Struct("3i")
"""Linux's ``struct ucred``: process, user, group."""
_BLAME_S = 1.0
"""Most seconds to pass on the number of a rank before this one ends because of it."""
_TOGETHER_S = 0.5
"""Most seconds between the times at which this rank notices ends of which it names the first one."""
_RANK_BYTES = 4
_UNKNOWN = -1
"""In place of the number of a rank that has connected and has not sent it yet."""


@frozen
class _Gone:
    """A rank whose process has ended.

    Args:
        until: the time, by the monotonic clock, until which a restarted process may take its place.
        at_s: when it ended, in seconds since the boot.
        because_of: the rank because of which it ended; `NOBODY` if it is not known.
    """

    until: float
    at_s: float
    because_of: int


class Presence:
    """Announces this rank to the others on this host, and detects their end.

    Args:
        job: host and port of the job's store.
        rank: this rank.
        size: how many there are.

    Attributes:
        ended: the first rank that was present and has ended; None if there is none.
    """

    def __init__(self, job: str, rank: int, size: int) -> None:
        self._key = f"\0panpipe/{os.getuid()}/{hashlib.sha256(job.encode()).hexdigest()}"
        self._rank, self._size = rank, size
        self.ended: int | None = None
        self._absent = deque(other for other in range(size) if other != rank)
        self._gone: dict[int, _Gone] = {}
        self._files = PresenceFiles(job, rank)
        self._lock = threading.Lock()
        self._follow: Callable[[int], object] = _nothing
        self._blamed: int | None = None
        self._passed_on = threading.Event()
        self._stopped = threading.Event()
        self._own: socket.socket | None = None
        self._selector = selectors.DefaultSelector()
        _OPEN.add(self)
        self._appear()
        self._thread = self._begun()

    def follow(self, ended: Callable[[int], object]) -> None:
        """Look for the others in a thread, and call a function with the first one that ends or has ended."""
        with self._lock:
            self._follow, now = ended, self.ended
        if now is not None:
            ended(now)
        elif self._stopped.is_set():  # for the ranks of another pipeline
            self._thread.join()
            self._stopped.clear()
            self._thread = self._begun()

    def blame(self, rank: int) -> None:
        """Send to the others which rank is the reason why this one ends, if its end was detected elsewhere."""
        if self._stopped.is_set() or threading.current_thread() is self._thread:
            return
        self._blamed = rank
        self._passed_on.wait(_BLAME_S)

    def stop(self) -> None:
        """Stop looking for the others: all have met. This rank stays visible to them until its process ends."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._files.end()

    def _begun(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name="panpipe presence", daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        while not self._stopped.is_set():
            if self._own is None:
                self._appear()
            for _ in range(min(len(self._absent), _AT_ONCE)):
                self._look_for(self._absent.popleft())
            self._stopped.wait(_POLL_S)
            if self.ended is None and self._own is not None:
                self._files.write()
            for key, _ in self._selector.select(0):
                if key.fileobj is self._own:
                    self._accept()
                elif key.data == _UNKNOWN:
                    self._identify(key)
                else:
                    self._hear(key)
            first = self._first_gone()
            if self._blamed is not None:
                self._end(self._blamed)
            elif first is not None:
                self._end(first)

    def _first_gone(self) -> int | None:
        """The rank that ended first, or because of which that one ended, if nobody has taken its place in time."""
        now = time.monotonic()
        if not any(gone.until < now for gone in self._gone.values()):
            return None
        over = {rank: gone for rank, gone in self._gone.items() if gone.until < now + _TOGETHER_S}
        first = min(over, key=lambda rank: over[rank].at_s)
        because_of = over[first].because_of
        return because_of if 0 <= because_of < self._size and because_of != self._rank else first

    def _note_end(self, rank: int) -> None:
        """Note that nobody is present as a rank that was."""
        left = self._files.of(rank)
        at_s = time.clock_gettime(time.CLOCK_BOOTTIME) if left is None else left.at_s
        self._gone[rank] = _Gone(time.monotonic() + _GRACE_S, at_s, NOBODY if left is None else left.because_of)

    def _end(self, rank: int) -> None:
        """Note the end of a rank, the first time, and pass it on."""
        if self.ended is not None:
            return
        with self._lock:
            self.ended, follow = rank, self._follow
        self._files.write(because_of=rank)
        for key in list(self._selector.get_map().values()):
            if key.data is not None and key.data != _UNKNOWN:
                self._pass_on(key.fileobj)
        self._passed_on.set()
        follow(rank)

    def _pass_on(self, end: object) -> None:
        """Send the number of the rank that has ended, if one has."""
        assert isinstance(end, socket.socket)
        if self.ended is not None:
            with suppress(OSError):
                end.send(self.ended.to_bytes(_RANK_BYTES))

    def _appear(self) -> None:
        """Listen; an earlier process of this rank may still have the name."""
        own = socket.socket(socket.AF_UNIX)
        try:
            own.bind(f"{self._key}/{self._rank}")
            own.listen(self._size)
        except OSError:
            own.close()
        else:
            own.setblocking(False)
            self._own = own
            self._selector.register(own, selectors.EVENT_READ)
            self._files.begin()

    def _accept(self) -> None:
        """Accept all ranks that have connected; processes of other users are refused."""
        assert self._own is not None
        with suppress(OSError):  # no further connection waits to be accepted
            while True:
                end, _ = self._own.accept()
                end.setblocking(False)
                if _of_this_user(end):
                    self._selector.register(end, selectors.EVENT_READ, _UNKNOWN)
                else:
                    end.close()

    def _identify(self, key: selectors.SelectorKey) -> None:
        """Read the number of a rank that has connected."""
        end, rank = key.fileobj, self._received(key)
        assert isinstance(end, socket.socket)
        self._selector.unregister(end)
        if rank is None:
            end.close()
            return
        self._gone.pop(rank, None)
        self._selector.register(end, selectors.EVENT_READ, rank)
        self._pass_on(end)

    def _received(self, key: selectors.SelectorKey) -> int | None:
        """The number of another rank; None at the end of the connection."""
        assert isinstance(key.fileobj, socket.socket)
        sent = b""
        with suppress(OSError):
            sent = key.fileobj.recv(_RANK_BYTES)
        rank = int.from_bytes(sent) if len(sent) == _RANK_BYTES else self._rank
        return rank if rank != self._rank and rank < self._size else None

    def _look_for(self, rank: int) -> None:
        """Connect to a rank; it is absent if nobody listens, or another user."""
        end = socket.socket(socket.AF_UNIX)
        try:
            end.setblocking(False)
            end.connect(f"{self._key}/{rank}")
            if _of_this_user(end):
                end.send(self._rank.to_bytes(_RANK_BYTES))
                self._gone.pop(rank, None)
                self._selector.register(end, selectors.EVENT_READ, rank)
                self._pass_on(end)
                return
        except ConnectionRefusedError:
            if rank not in self._gone and self._files.of(rank) is not None:
                self._note_end(rank)
        except OSError:
            pass
        end.close()
        self._absent.append(rank)

    def _hear(self, key: selectors.SelectorKey) -> None:
        """Read a message of another rank, or the end of its connection; a restarted process may take its number."""
        end, rank, seen = key.fileobj, key.data, self._received(key)
        assert isinstance(end, socket.socket)
        if seen is not None:
            self._end(seen)
            return
        self._selector.unregister(end)
        end.close()
        self._note_end(rank)
        if rank not in self._absent:
            self._absent.append(rank)

    def close(self) -> None:
        """Close the sockets: from now on other ranks do not detect this one."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.close_sockets()

    def close_sockets(self) -> None:
        """Close this process's sockets; a fork has no thread that uses them."""
        known = self._selector.get_map()  # None after a first call
        for end in [key.fileobj for key in known.values()] if known else ():
            assert isinstance(end, socket.socket)
            end.close()
        self._selector.close()
        if self._own is not None:
            self._own.close()
        self._files.close()


def _of_this_user(end: socket.socket) -> bool:
    """Whether the other end is a process of the same user."""
    _, user, _ = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(user == os.getuid())


def _nothing(_: int) -> None:
    """Nobody follows yet."""


_OPEN: WeakSet[Presence] = WeakSet()
_HERE: dict[tuple[int, str, int], Presence] = {}
"""(Process, job, rank) → its presence."""


def presence_of(job: str, rank: int, size: int) -> Presence | None:
    """The presence of a rank in this process, which begins if there is none; None on systems without such sockets.

    Args:
        job: host and port of the job's store.
        rank: this rank.
        size: how many there are.
    """
    if not sys.platform.startswith("linux"):
        return None
    key = os.getpid(), job, rank
    if key not in _HERE:
        _HERE[key] = Presence(job, rank, size)
    return _HERE[key]


def _close_all() -> None:
    for each in _OPEN:
        with suppress(OSError):
            each.close_sockets()


# A child, such as a DataLoader's worker, would keep them open after its parent's death.
os.register_at_fork(after_in_child=_close_all)
