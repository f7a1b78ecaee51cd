"""Connections that break when a process dies."""

import os
import signal
import socket

import pytest
from panpipe.runtimes.launch.lifeline import Lifeline
from torch.distributed import HashStore

from ..support.launch import HANGS_S


class Missed:
    """What a rank is told."""

    def __init__(self):
        self.said = []

    def __call__(self, error):
        self.said.append(str(error))


def forked(store, rank, size, then):
    """A process that is this rank and ends by what is given; HashStore is this process's, so it is asked before."""
    number = store.add(f"panpipe/lifelines/{rank}", 1)
    found = store.get(f"panpipe/lifeline/{number}")

    class Known:
        def add(self, *_):
            return number

        def get(self, _):
            return found

    child = os.fork()
    if child == 0:
        try:
            then(Lifeline(Known(), rank, size, lambda _: None))
        finally:
            os._exit(0)
    return child


def killed(_):
    os.kill(os.getpid(), signal.SIGKILL)


def left(lifeline):
    lifeline.leave()


@pytest.mark.parametrize(("how", "said"), [
    (killed, ["rank 2 stopped answering: its process ended"]), (left, []),
])  # fmt: skip
def test_a_process_that_dies_is_missed_and_one_that_leaves_is_not(how, said):
    store, missed = HashStore(), Missed()
    here = Lifeline(store, 0, 3, missed)
    one, two = (forked(store, rank, 3, then) for rank, then in ((1, left), (2, how)))
    for child in (one, two):
        os.waitpid(child, 0)
    here._thread.join(HANGS_S)  # it ends when it has heard the last of both
    assert not here._thread.is_alive()
    assert missed.said == said
    here.leave()
    here.leave()


def test_ranks_that_leave_wake_each_others_threads():
    store, missed = HashStore(), Missed()
    ends = [Lifeline(store, rank, 3, missed) for rank in range(3)]
    for end in ends:
        end.leave()  # which waits for the thread for some seconds
    assert not any(end._thread.is_alive() for end in ends)
    assert missed.said == []


def test_rank_0_leaves_though_nobody_called():
    here = Lifeline(HashStore(), 0, 2, Missed())
    here.leave()
    assert not here._thread.is_alive()


def test_a_stranger_is_nobody():
    store, missed = HashStore(), Missed()
    here = Lifeline(store, 0, 2, missed)
    port = int(store.get("panpipe/lifeline/1").split()[0])
    with socket.create_connection(("localhost", port)) as stranger:
        stranger.sendall(b"x" * 20)
        assert stranger.recv(1) == b""
    other = Lifeline(store, 1, 2, missed)
    other.leave()
    here.leave()
    assert missed.said == []


def test_who_does_not_reach_rank_0_says_so_and_goes_on(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    store = HashStore()
    with socket.create_server(("localhost", 0)) as gone:
        port = gone.getsockname()[1]
    store.set("panpipe/lifeline/1", f"{port} {'00' * 16}")
    with pytest.warns(UserWarning, match=rf"rank 1 does not reach rank 0 at localhost:{port} \(.*refused\)"):
        Lifeline(store, 1, 2, Missed()).leave()
