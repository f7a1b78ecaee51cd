"""Connections between ranks that break when a process dies."""

import os
import signal
import socket
import time
from contextlib import suppress

import pytest
from panpipe.runtimes.watch.peer_connections import PeerConnections
from torch.distributed import HashStore

from ...support.launch import HANGS_S


class Deaths:
    """The deaths that a rank detects; a report takes longer than a test's look at who is watched."""

    def __init__(self):
        self.messages = []

    def __call__(self, error):
        time.sleep(0.1)
        self.messages.append(str(error))


def forked(store, rank, size, then):
    """Fork a process for this rank that calls ``then`` and ends; HashStore is local to this process, so it is read
    before the fork."""
    number = store.add(f"panpipe/connected/{rank}", 1)
    found = store.get(f"panpipe/connections/{number}")

    class Known:
        def add(self, *_):
            return number

        def check(self, _):
            return True

        def get(self, _):
            return found

    child = os.fork()
    if child == 0:
        try:
            connections = PeerConnections(Known(), rank, size, lambda _: None)
            while connections.connecting:
                time.sleep(0.01)
            then(connections)
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
    deadline = time.monotonic() + HANGS_S
    while (len(here.seen) < 2 or here.watched) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert here.watched == set()
    assert deaths.messages == messages
    here.leave()
    here.leave()


def test_ranks_that_leave_wake_each_others_threads():
    store, deaths = HashStore(), Deaths()
    ends = [PeerConnections(store, rank, 3, deaths) for rank in range(3)]
    deadline = time.monotonic() + HANGS_S
    while len(ends[0].watched) < 2 and time.monotonic() < deadline:  # rank 0 has to accept them first
        time.sleep(0.01)
    for end in ends:
        end.leave()  # waits for the thread for some seconds
    assert not any(end._thread.is_alive() for end in ends)
    assert deaths.messages == []


def test_rank_0_leaves_when_no_rank_has_connected():
    here = PeerConnections(HashStore(), 0, 2, Deaths())
    here.leave()
    assert not here._thread.is_alive()


def published(store):
    """Host, port and token of rank 0."""
    host, port, token = store.get("panpipe/connections/1").decode().split()
    return (host, int(port)), bytes.fromhex(token)


@pytest.mark.parametrize("sent", [b"x" * 36, b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100, b"\xff" * 4096])
def test_connection_without_the_token_is_closed(sent):
    store, deaths = HashStore(), Deaths()
    here = PeerConnections(store, 0, 2, deaths)
    with socket.create_connection(published(store)[0]) as stranger, suppress(ConnectionResetError):
        stranger.sendall(sent)
        assert stranger.recv(1) == b""
    leave_in_order(store, here, deaths)


def leave_in_order(store, here, deaths):
    """Connect rank 1, and leave."""
    other = PeerConnections(store, 1, 2, deaths)
    deadline = time.monotonic() + HANGS_S
    while not here.watched and time.monotonic() < deadline:
        time.sleep(0.01)
    assert here.watched == {1}
    other.leave()
    here.leave()
    assert deaths.messages == []


def test_silent_strangers_block_no_rank():
    store, deaths = HashStore(), Deaths()
    here = PeerConnections(store, 0, 2, deaths)
    strangers = [socket.create_connection(published(store)[0]) for _ in range(100)]
    begun = time.monotonic()
    leave_in_order(store, here, deaths)
    assert time.monotonic() - begun < 15  # a connection has 20 s to identify itself
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize("rank", [0, 2, 1 << 31])
def test_connection_with_the_token_and_no_rank_of_the_job_is_closed(rank):
    store, deaths = HashStore(), Deaths()
    here = PeerConnections(store, 0, 2, deaths)
    address, token = published(store)
    with socket.create_connection(address) as stranger:
        stranger.sendall(token + rank.to_bytes(4))
        assert stranger.recv(1) == b""
    leave_in_order(store, here, deaths)


def test_second_connection_of_a_rank_is_closed():
    store, deaths = HashStore(), Deaths()
    here = PeerConnections(store, 0, 3, deaths)
    address, token = published(store)
    other = PeerConnections(store, 1, 3, deaths)
    while not here.watched:
        time.sleep(0.01)
    with socket.create_connection(address) as stranger:
        stranger.sendall(token + (1).to_bytes(4))
        assert stranger.recv(1) == b""
    assert here.watched == {1}
    other.leave()
    here.leave()


def test_rank_0_listens_on_the_loopback_interface_for_one_host(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    store = HashStore()
    here = PeerConnections(store, 0, 2, Deaths())
    assert published(store)[0][0] == "127.0.0.1"
    here.leave()


def test_rank_that_does_not_reach_rank_0_warns_and_continues():
    store = HashStore()
    with socket.create_server(("localhost", 0)) as gone:
        port = gone.getsockname()[1]
    store.set("panpipe/connections/1", f"127.0.0.1 {port} {'00' * 32}")
    with pytest.warns(UserWarning, match=rf"rank 1 does not reach rank 0 at 127.0.0.1:{port} \(.*refused\)"):
        connect_and_leave(store)


def connect_and_leave(store):
    """Rank 1, which tries to connect, and leaves."""
    here = PeerConnections(store, 1, 2, Deaths())
    deadline = time.monotonic() + HANGS_S
    while here.connecting and time.monotonic() < deadline:
        time.sleep(0.01)
    here.leave()
