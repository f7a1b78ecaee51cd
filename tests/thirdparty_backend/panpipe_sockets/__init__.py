"""A backend over TCP: one connection for each pair of ranks, a thread that writes to it and one that reads from it.

send     ──▶ outbox ──writer──▶ socket ═══▶ socket ──reader──▶ buffers
receive  ──▶ inbox  ─────────────────────────────────┘
"""

import socket
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any, ClassVar

import torch
from panpipe import WorkerError
from panpipe.backends.contract import Backend
from panpipe.backends.data_collectives import all_gather_data
from panpipe.backends.kind import BackendKind
from torch import Tensor


class Transfer:
    """A message that a connection's thread sends or receives."""

    def __init__(self, tensors: Sequence[Tensor], peer: int) -> None:
        self.tensors = tensors
        self.peer = peer
        self.failure: Exception | None = None
        self.over = threading.Event()

    def wait(self) -> None:
        self.over.wait()
        if self.failure is not None:
            raise WorkerError(f"rank {self.peer} stopped answering: {self.failure}") from self.failure


class Connection:
    """The connection to another rank."""

    def __init__(self, link: socket.socket) -> None:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.link = link
        self.outbox: SimpleQueue[Transfer | None] = SimpleQueue()
        self.inbox: SimpleQueue[Transfer | None] = SimpleQueue()
        for box, move in ((self.outbox, self._write), (self.inbox, self._read)):
            threading.Thread(target=self._work, args=(box, move), daemon=True).start()

    def _work(self, box: "SimpleQueue[Transfer | None]", move: Any) -> None:
        while (transfer := box.get()) is not None:
            try:
                for tensor in transfer.tensors:
                    move(tensor)
            except OSError as failure:
                transfer.failure = failure
            transfer.over.set()

    def _write(self, tensor: Tensor) -> None:
        values = tensor.resolve_conj().resolve_neg().contiguous()
        self.link.sendall(values.reshape(-1).view(torch.uint8).numpy())

    def _read(self, buffer: Tensor) -> None:
        left = memoryview(buffer.reshape(-1).view(torch.uint8).numpy())
        while left:
            count = self.link.recv_into(left)
            if count == 0:
                raise ConnectionError("the connection was closed")
            left = left[count:]


class SocketBackend(Backend):
    """One rank's end."""

    name: ClassVar[str] = "sockets"

    def __init__(self, group: Any) -> None:
        self.device, self.devices = group.rank(), group.size()
        door = socket.create_server(("127.0.0.1", 0))
        addresses = all_gather_data(door.getsockname(), group)
        self.connections: dict[int, Connection] = {}
        for peer in range(self.device):  # lower ranks listen
            link = socket.create_connection(addresses[peer])
            link.sendall(self.device.to_bytes(4, "big"))
            self.connections[peer] = Connection(link)
        while len(self.connections) < self.devices - 1:
            link, _ = door.accept()
            self.connections[int.from_bytes(link.recv(4, socket.MSG_WAITALL), "big")] = Connection(link)
        door.close()

    def send(self, tensors: Sequence[Tensor], peer: int) -> Transfer:
        transfer = Transfer(tensors, peer)
        self.connections[peer].outbox.put(transfer)
        return transfer

    def receive(self, buffers: Sequence[Tensor], peer: int) -> Transfer:
        transfer = Transfer(buffers, peer)
        self.connections[peer].inbox.put(transfer)
        return transfer

    def close(self, failure: BaseException | None = None) -> None:
        for connection in self.connections.values():
            connection.outbox.put(None)
            connection.inbox.put(None)
            connection.link.close()
        self.connections.clear()


KIND = BackendKind(
    "sockets",
    "one TCP connection for each pair of ranks of a machine",
    ranks=SocketBackend,
    dtypes=frozenset({torch.float16, torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64}),
)
