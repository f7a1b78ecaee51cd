"""Connections between ranks that break when a process dies, so that its death is detected without messages to it.

A transport detects a killed rank at most when another rank communicates with it, and not every transport does: NCCL's
kernels wait on the GPU for a counterpart that never comes, and the host waits for them. So every rank keeps a
connection to rank 0, on which it sends a single byte when it leaves::

    rank 1 ══▶ rank 0 ◀══ rank 2        rank 0 detects the death of any other rank, all others that of rank 0

If a process ends without that byte, the operating system closes its connections, and the other end sees it at once. A
slow or stopped rank keeps them. A detected death goes to the `watch` that made the connections, which reports it.
"""

import atexit
import os
import secrets
import selectors
import socket
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from ...core.errors import WorkerError

_FAREWELL = b"."
_CONNECT_S = 20.0
"""Most seconds for the other end to answer."""
_RANK_BYTES = 4
_TOKEN_BYTES = 16


class PeerConnections:
    """This rank's connections. All ranks of the job create one.

    Args:
        store: the job's, in which rank 0 publishes its port.
        rank: this rank.
        size: how many there are; at least two.
        died: called in a thread with the error for a rank whose process died.
        left: called in that thread when rank 0 leaves.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        died: Callable[[WorkerError], object],
        left: Callable[[], object] = lambda: None,
    ) -> None:
        self._others, self._died, self._rank_0_left = size - 1, died, left
        self._left, self._accepted = threading.Event(), threading.Event()
        self._peers: dict[socket.socket, int] = {}
        self._server: socket.socket | None = None
        self._token = b""
        # The job may have had earlier ones.
        key = f"panpipe/connections/{store.add(f'panpipe/connected/{rank}', 1)}"
        if rank:
            self._connect(store, key, rank)
        else:
            self._listen(store, key)
        self._thread = threading.Thread(target=self._watch, name="panpipe peer connections", daemon=True)
        self._thread.start()
        _OPEN.add(self)
        atexit.register(self.leave)  # a process that ends normally without closing the pipeline has not died

    def _listen(self, store: Any, key: str) -> None:
        """Listen, and publish the port and a token."""
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        server = self._server = socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=self._others)
        server.settimeout(_CONNECT_S)
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        store.set(key, f"{server.getsockname()[1]} {self._token.hex()}")

    def _connect(self, store: Any, key: str, rank: int) -> None:
        """Connect to rank 0."""
        port, token = store.get(key).decode().split()
        host = os.environ.get("MASTER_ADDR", "localhost")
        try:
            peer = socket.create_connection((host, int(port)), timeout=_CONNECT_S)
        except OSError as error:
            warnings.warn(
                f"rank {rank} does not reach rank 0 at {host}:{port} ({error}): the death of one of the two is "
                "detected only when a message between them fails; let ranks connect to each other's ports",
                stacklevel=4,
            )
            return
        peer.settimeout(None)
        peer.sendall(bytes.fromhex(token) + rank.to_bytes(_RANK_BYTES))
        self._peers[peer] = 0

    def _accept(self, server: socket.socket) -> None:
        """Accept the connections of all other ranks."""
        with server:
            while len(self._peers) < self._others:
                peer, _ = server.accept()
                received = _read(peer, _TOKEN_BYTES + _RANK_BYTES)
                if received[:_TOKEN_BYTES] == self._token:
                    self._peers[peer] = int.from_bytes(received[_TOKEN_BYTES:])
                    continue
                peer.close()
                if self._left.is_set():
                    return

    def _watch(self) -> None:
        if self._server is not None:
            with suppress(OSError):  # some never connected: the others are watched
                self._accept(self._server)
        self._accepted.set()
        with selectors.DefaultSelector() as selector:
            for peer in self._peers:
                selector.register(peer, selectors.EVENT_READ)
            while selector.get_map() and not self._left.is_set():
                for key, _ in selector.select():
                    assert isinstance(key.fileobj, socket.socket)
                    received = b""
                    with suppress(OSError):
                        received = key.fileobj.recv(1)
                    selector.unregister(key.fileobj)
                    if received and self._peers[key.fileobj] == 0:
                        self._rank_0_left()
                    if not received and not self._left.is_set():
                        rank = self._peers[key.fileobj]
                        self._died(WorkerError.stopped_answering([rank], "its process ended"))

    def leave(self) -> None:
        """Announce that this rank leaves, and stop watching; further calls have no effect."""
        if self._left.is_set():
            return
        self._left.set()
        atexit.unregister(self.leave)
        if self._server is not None and not self._accepted.is_set():
            self._accept_last(self._server)
        for peer in [*self._peers]:
            with suppress(OSError):  # it may have left already
                peer.sendall(_FAREWELL)
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(_CONNECT_S)
        self.close()

    def _accept_last(self, server: socket.socket) -> None:
        """Make the thread accept the pending connections, so that their ranks also receive the farewell."""
        with suppress(OSError):  # it accepted the last one meanwhile
            socket.create_connection(("localhost", server.getsockname()[1]), timeout=_CONNECT_S).close()
        self._accepted.wait(_CONNECT_S)

    def close(self) -> None:
        """Close this process's connections without a farewell."""
        for end in self._ends:
            end.close()

    @property
    def _ends(self) -> list[socket.socket]:
        return [*self._peers, *([] if self._server is None else [self._server])]


_OPEN: WeakSet[PeerConnections] = WeakSet()


def _close_all() -> None:
    for connections in _OPEN:
        connections.close()


# A child, such as a DataLoader's worker, would keep them open after its parent's death.
os.register_at_fork(after_in_child=_close_all)


def _read(peer: socket.socket, count: int) -> bytes:
    """Read this many bytes, or fewer if the connection ends or times out before."""
    received = b""
    peer.settimeout(_CONNECT_S)
    with suppress(OSError):
        while len(received) < count and (more := peer.recv(count - len(received))):
            received += more
    peer.settimeout(None)
    return received
