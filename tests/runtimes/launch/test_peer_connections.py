"""Connections between ranks that break when a process dies."""

import os
import signal
import socket

import pytest
from panpipe.runtimes.launch.peer_connections import PeerConnections
from torch.distributed import HashStore

from ...support.launch import HANGS_S


class Deaths:
    """The deaths that a rank detects."""

    def __init__(self):
        self.messages = []

    def __call__(self, error):
        self.messages.append(str(error))


def forked(store, rank, size, then):
    """Fork a process for this rank that calls ``then`` and ends; HashStore is local to this process, so it is read
    before the fork."""
    number = store.add(f"panpipe/connected/{rank}", 1)
    found = store.get(f"panpipe/connections/{number}")

    class Known:
        def add(self, *_):
            return number

        def get(self, _):
            return found

    child = os.fork()
    if child == 0:
        try:
            then(PeerConnections(Known(), rank, size, lambda _: None))
        finally:
            os._exit(0)
    return child


def killed(_):
    os.kill(os.getpid(), signal.SIGKILL)


def left(connections):
    connections.leave()


@pytest.mark.parametrize(("how", "messages"), [
    (killed, ["rank 2 stopped answering: its process ended"]), (left, []),
])  # fmt: skip
def test_rank_0_detects_a_process_that_dies_and_not_one_that_leaves(how, messages):
    store, deaths = HashStore(), Deaths()
    here = PeerConnections(store, 0, 3, deaths)
    one, two = (forked(store, rank, 3, then) for rank, then in ((1, left), (2, how)))
    for child in (one, two):
        os.waitpid(child, 0)
    here._thread.join(HANGS_S)  # it ends when both connections have ended
    assert not here._thread.is_alive()
    assert deaths.messages == messages
    here.leave()
    here.leave()


def test_ranks_that_leave_wake_each_others_threads():
    store, deaths = HashStore(), Deaths()
    ends = [PeerConnections(store, rank, 3, deaths) for rank in range(3)]
    for end in ends:
        end.leave()  # waits for the thread for some seconds
    assert not any(end._thread.is_alive() for end in ends)
    assert deaths.messages == []


def test_rank_0_leaves_when_no_rank_has_connected():
    here = PeerConnections(HashStore(), 0, 2, Deaths())
    here.leave()
    assert not here._thread.is_alive()


def test_a_connection_without_the_token_is_ignored():
    store, deaths = HashStore(), Deaths()
    here = PeerConnections(store, 0, 2, deaths)
    port = int(store.get("panpipe/connections/1").split()[0])
    with socket.create_connection(("localhost", port)) as stranger:
        stranger.sendall(b"x" * 20)
        assert stranger.recv(1) == b""
    other = PeerConnections(store, 1, 2, deaths)
    other.leave()
    here.leave()
    assert deaths.messages == []


def test_a_rank_that_does_not_reach_rank_0_warns_and_continues(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    store = HashStore()
    with socket.create_server(("localhost", 0)) as gone:
        port = gone.getsockname()[1]
    store.set("panpipe/connections/1", f"{port} {'00' * 16}")
    with pytest.warns(UserWarning, match=rf"rank 1 does not reach rank 0 at localhost:{port} \(.*refused\)"):
        PeerConnections(store, 1, 2, Deaths()).leave()
