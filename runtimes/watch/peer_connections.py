"""Connections between ranks that break when a process dies, so that its death is detected without messages to it.

A transport detects a killed rank at most when another rank communicates with it, and not every transport does: NCCL's
kernels wait on the GPU for a counterpart that never comes, and the host waits for them. So every rank keeps a
connection to rank 0, on which it sends a single byte when it leaves::

    rank 1 ══▶ rank 0 ◀══ rank 2        rank 0 detects the death of any other rank, all others that of rank 0

If a process ends without that byte, the operating system closes its connections, and the other end sees it at once. A
slow or stopped rank keeps them. A detected death goes to the `watch` that made the connections, which reports it.

Rank 0 listens on one interface (`address`). A connection begins with the job's token and the rank's number, a fixed
number of bytes; rank 0 closes others, and waits for none of them: one thread serves all connections.
"""

import atexit
import hmac
import os
import secrets
import selectors
import socket
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from attrs import define

from ...core.errors import WorkerError
from .address import listen

_FAREWELL = b"."
_LEFT = "left"
"""What rank 0 publishes in place of its address when it leaves."""
_CONNECT_S = 20.0
"""Most seconds for the other end to answer."""
_LAST_S = 1.0
"""Most seconds that rank 0 waits for a rank that connects while it leaves."""
_POLL_S = 0.1
_RANK_BYTES = 4
_TOKEN_BYTES = 32
_PENDING = 64
"""Connections without a token that are kept at a time; the oldest are closed."""


@define(eq=False)
class _Pending:
    """An accepted connection that has not sent the token yet."""

    socket: socket.socket
    until: float
    received: bytes = b""


class PeerConnections:
    """This rank's connections. All ranks of the job create one; none waits for another here.

    Args:
        store: the job's, in which rank 0 publishes its address.
        rank: this rank.
        size: how many there are; at least two.
        died: called in a thread with the error for a rank whose process died.
        left: called in that thread when rank 0 leaves.

    Attributes:
        connecting: whether this rank has not tried to connect yet.
        seen: the ranks that have connected to rank 0.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        died: Callable[[WorkerError], object],
        left: Callable[[], object] = lambda: None,
    ) -> None:
        self._rank, self._size, self._died, self._rank_0_left = rank, size, died, left
        self._store, self._left = store, threading.Event()
        self._peers: dict[socket.socket, int] = {}
        self._pending: dict[socket.socket, _Pending] = {}
        self.seen: set[int] = set()
        self._wake, self._woken = socket.socketpair()
        self.connecting = True
        self._server: socket.socket | None = None
        # The job may have had earlier ones.
        self._key = f"panpipe/connections/{store.add(f'panpipe/connected/{rank}', 1)}"
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        if rank == 0:
            server = self._server = listen(backlog=max(128, size))
            server.setblocking(False)
            host, port = server.getsockname()[:2]
            store.set(self._key, f"{host} {port} {self._token.hex()}")
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="panpipe peer connections", daemon=True)
        self._thread.start()
        _OPEN.add(self)
        atexit.register(self.leave)  # a process that ends normally without closing the pipeline has not died

    @property
    def watched(self) -> set[int]:
        """The connected ranks that have neither left nor been reported dead."""
        return set(self._peers.values())

    def _run(self) -> None:
        try:
            self._selector.register(self._woken, selectors.EVENT_READ)
            if self._server is not None:
                self._selector.register(self._server, selectors.EVENT_READ)
            else:
                self._connect()
            self.connecting = False
            while not self._left.is_set():
                self._serve()
            self._say_farewell()
        except RuntimeError:  # the store has ended, which the watch detects
            pass
        finally:
            self.connecting = False
            self.close()

    def _connect(self) -> None:
        """Connect to rank 0, when it has published its address."""
        while not self._store.check([self._key]):
            if self._left.wait(_POLL_S):
                return
        published = self._store.get(self._key).decode()
        if published == _LEFT:
            self._rank_0_left()
            return
        host, port, token = published.split()
        try:
            peer = socket.create_connection((host, int(port)), timeout=_CONNECT_S)
            peer.sendall(bytes.fromhex(token) + self._rank.to_bytes(_RANK_BYTES))
        except OSError as error:
            if self._store.get(self._key).decode() == _LEFT:
                self._rank_0_left()
                return
            warnings.warn(
                f"rank {self._rank} does not reach rank 0 at {host}:{port} ({error}): the death of one of the two is "
                "detected only when a message between them fails; let ranks connect to each other's ports",
                stacklevel=2,
            )
            return
        peer.setblocking(False)
        self._peers[peer] = 0
        self._selector.register(peer, selectors.EVENT_READ)

    def _serve(self, timeout_s: float | None = None) -> None:
        """Wait for events, and handle them."""
        now = time.monotonic()
        for late in [each for each in self._pending.values() if each.until <= now]:
            self._drop(late)
        until = min((each.until - now for each in self._pending.values()), default=timeout_s)
        for key, _ in self._selector.select(until if timeout_s is None else timeout_s):
            end = key.fileobj
            assert isinstance(end, socket.socket)
            if end is self._server:
                self._accept(end)
            elif end in self._pending:
                self._identify(self._pending[end])
            elif end in self._peers:
                self._hear(end)

    def _accept(self, server: socket.socket) -> None:
        with suppress(OSError):  # it is gone already
            peer, _ = server.accept()
            peer.setblocking(False)
            self._pending[peer] = _Pending(peer, time.monotonic() + _CONNECT_S)
            self._selector.register(peer, selectors.EVENT_READ)
            if len(self._pending) > _PENDING:
                self._drop(next(iter(self._pending.values())))

    def _identify(self, pending: _Pending) -> None:
        """Read the token and the rank of a connection; close it if they are not those of the job."""
        try:
            more = pending.socket.recv(_TOKEN_BYTES + _RANK_BYTES - len(pending.received))
        except OSError:
            more = b""
        pending.received += more
        if more and len(pending.received) < _TOKEN_BYTES + _RANK_BYTES:
            return
        token, rank = pending.received[:_TOKEN_BYTES], int.from_bytes(pending.received[_TOKEN_BYTES:])
        new = 0 < rank < self._size and rank not in self.seen
        if not more or not hmac.compare_digest(token, self._token) or not new:
            self._drop(pending)
            return
        del self._pending[pending.socket]
        self._peers[pending.socket] = rank
        self.seen.add(rank)
        if len(self.seen) == self._size - 1 and self._server is not None:
            self._selector.unregister(self._server)
            self._server.close()

    def _drop(self, pending: _Pending) -> None:
        del self._pending[pending.socket]
        self._selector.unregister(pending.socket)
        pending.socket.close()

    def _hear(self, peer: socket.socket) -> None:
        """Read the farewell of a rank, or the end of its connection, which shows that its process died."""
        received = b""
        with suppress(OSError):
            received = peer.recv(1)
        self._selector.unregister(peer)
        peer.close()
        rank = self._peers[peer]
        if received and rank == 0:
            self._rank_0_left()
        if not received and not self._left.is_set():
            self._died(WorkerError.stopped_answering([rank], "its process ended"))
        del self._peers[peer]  # last: a rank that is watched no longer has been reported

    def leave(self) -> None:
        """Announce that this rank leaves, and stop watching; further calls have no effect."""
        if self._left.is_set():
            return
        self._left.set()
        atexit.unregister(self.leave)
        with suppress(OSError):
            self._wake.send(_FAREWELL)
        if threading.current_thread() is not self._thread:
            self._thread.join(_CONNECT_S)

    def _say_farewell(self) -> None:
        """Send the farewell to all, also to ranks that have just connected."""
        until = time.monotonic() + _LAST_S
        if self._server is not None and len(self.seen) < self._size - 1:
            self._selector.unregister(self._woken)
            self._store.set(self._key, _LEFT)
            self._serve(0)
            while self._pending and time.monotonic() < until:
                self._serve(_POLL_S)
        for peer in self._peers:
            with suppress(OSError):  # it may have left already
                peer.sendall(_FAREWELL)

    def close(self) -> None:
        """Close this process's connections without a farewell."""
        ends = [*self._peers, *self._pending, self._wake, self._woken]
        for end in [*ends, *([] if self._server is None else [self._server])]:
            end.close()
        self._selector.close()


_OPEN: WeakSet[PeerConnections] = WeakSet()


def _close_all() -> None:
    for connections in _OPEN:
        connections.close()


# A child, such as a DataLoader's worker, would keep them open after its parent's death.
os.register_at_fork(after_in_child=_close_all)
