"""Connections between ranks that break when a process dies: who talks to nobody, or waits in vain, learns of it, too.

A transport misses a killed rank where somebody talks to it, and not every transport does: NCCL's kernels wait on the
GPU for a counterpart that never comes, and the host for them. So every rank keeps a connection to rank 0, on which it
says one word, that it leaves::

    rank 1 ══▶ rank 0 ◀══ rank 2        rank 0 misses any other rank, and all others miss rank 0

However a process ends without that word, the operating system closes its connections, and the other end sees it at
once. A rank that is slow, or stands still, keeps them. What is seen goes to the job's `watch`, which tells all.
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
"""How long the other end may take to answer."""
_RANK_BYTES = 4
_TOKEN_BYTES = 16


class Lifeline:
    """This rank's part. Made on all ranks of the job.

    Args:
        store: the job's, where rank 0 says how it is reached.
        rank: this rank.
        size: how many there are; two at least.
        missed: told, in a thread, of ranks whose process died.
        left: called in that thread when rank 0 leaves.
    """

    def __init__(
        self, store: Any, rank: int, size: int, missed: Callable[[WorkerError], object],
        left: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self._others, self._missed, self._rank_0_left = size - 1, missed, left
        self._left, self._met = threading.Event(), threading.Event()
        self._peers: dict[socket.socket, int] = {}
        self._server: socket.socket | None = None
        self._token = b""
        # The job may have had others before.
        key = f"panpipe/lifeline/{store.add(f'panpipe/lifelines/{rank}', 1)}"
        if rank:
            self._call(store, key, rank)
        else:
            self._listen(store, key)
        self._thread = threading.Thread(target=self._look, name="panpipe lifeline", daemon=True)
        self._thread.start()
        _OPEN.add(self)
        atexit.register(self.leave)  # who is through without closing the pipeline has not died

    def _listen(self, store: Any, key: str) -> None:
        """Say where this rank is reached."""
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        server = self._server = socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=self._others)
        server.settimeout(_CONNECT_S)
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        store.set(key, f"{server.getsockname()[1]} {self._token.hex()}")

    def _call(self, store: Any, key: str, rank: int) -> None:
        """Connect to rank 0."""
        port, token = store.get(key).decode().split()
        host = os.environ.get("MASTER_ADDR", "localhost")
        try:
            peer = socket.create_connection((host, int(port)), timeout=_CONNECT_S)
        except OSError as error:
            warnings.warn(
                f"rank {rank} does not reach rank 0 at {host}:{port} ({error}): that one of the two was killed is "
                "noticed only where messages between them fail; let ranks connect to each other's ports",
                stacklevel=4,
            )
            return
        peer.settimeout(None)
        peer.sendall(bytes.fromhex(token) + rank.to_bytes(_RANK_BYTES))
        self._peers[peer] = 0

    def _accept(self, server: socket.socket) -> None:
        """Take the calls of all others."""
        with server:
            while len(self._peers) < self._others:
                peer, _ = server.accept()
                said = _read(peer, _TOKEN_BYTES + _RANK_BYTES)
                if said[:_TOKEN_BYTES] == self._token:
                    self._peers[peer] = int.from_bytes(said[_TOKEN_BYTES:])
                    continue
                peer.close()
                if self._left.is_set():
                    return

    def _look(self) -> None:
        if self._server is not None:
            with suppress(OSError):  # some never called: those that did are looked after
                self._accept(self._server)
        self._met.set()
        with selectors.DefaultSelector() as selector:
            for peer in self._peers:
                selector.register(peer, selectors.EVENT_READ)
            while selector.get_map() and not self._left.is_set():
                for key, _ in selector.select():
                    assert isinstance(key.fileobj, socket.socket)
                    said = b""
                    with suppress(OSError):
                        said = key.fileobj.recv(1)
                    selector.unregister(key.fileobj)
                    if said and self._peers[key.fileobj] == 0:
                        self._rank_0_left()
                    if not said and not self._left.is_set():
                        rank = self._peers[key.fileobj]
                        self._missed(WorkerError(f"rank {rank} stopped answering: its process ended"))

    def leave(self) -> None:
        """Say that this rank leaves, and look after nobody any longer; again does no harm."""
        if self._left.is_set():
            return
        self._left.set()
        atexit.unregister(self.leave)
        if self._server is not None and not self._met.is_set():
            self._take_last_calls(self._server)
        for peer in [*self._peers]:
            with suppress(OSError):  # it may have left already
                peer.sendall(_FAREWELL)
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # which wakes the thread
        self._thread.join(_CONNECT_S)
        self.let_go()

    def _take_last_calls(self, server: socket.socket) -> None:
        """Have the thread take the calls that came already: they shall hear that this rank leaves."""
        with suppress(OSError):  # it took the last one meanwhile
            socket.create_connection(("localhost", server.getsockname()[1]), timeout=_CONNECT_S).close()
        self._met.wait(_CONNECT_S)

    def let_go(self) -> None:
        """Close this process's connections without a word."""
        for end in self._ends:
            end.close()

    @property
    def _ends(self) -> list[socket.socket]:
        return [*self._peers, *([] if self._server is None else [self._server])]


_OPEN: WeakSet[Lifeline] = WeakSet()


def _let_go_of_all() -> None:
    for lifeline in _OPEN:
        lifeline.let_go()


# A child, such as a DataLoader's worker, would keep them open behind its parent's death.
os.register_at_fork(after_in_child=_let_go_of_all)


def _read(peer: socket.socket, count: int) -> bytes:
    """So many bytes, or what came before the connection ended or was silent for too long."""
    said = b""
    peer.settimeout(_CONNECT_S)
    with suppress(OSError):
        while len(said) < count and (more := peer.recv(count - len(said))):
            said += more
    peer.settimeout(None)
    return said
