"""The failure watch on one process's store: reasons, silent ranks, absent ranks. Its thread is stopped or short."""

import sys
import threading
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from panpipe.core.errors import WorkerError
from panpipe.runtimes.watch import lost_ranks, published_positions, watch
from panpipe.runtimes.watch.lost_ranks import numbered
from panpipe.runtimes.watch.watch import FailureWatch


@pytest.fixture
def store(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(watch, "_POLL_S", 0.05)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    return store


@pytest.fixture
def stopped_watch(store):
    """The watch of rank 1 of 3, whose thread has ended."""
    found = FailureWatch(1, 3)
    found.stop()
    return found


@contextmanager
def alive(store, *ranks):
    """A context in which ranks send heartbeats."""
    over = threading.Event()

    def run():
        while not over.wait(0.01):
            for rank in ranks:
                store.add(lost_ranks._beat_key(rank), 1)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_phrase_names_several_ranks():
    assert [numbered([2]), numbered([1, 2])] == ["rank 2", "ranks 1, 2"]


def test_watch_names_a_rank_whose_heartbeat_is_missing_as_the_one_that_stopped(store, stopped_watch, monkeypatch):
    monkeypatch.setattr(lost_ranks, "_SILENCE_S", 1.0)
    lost = WorkerError("the connection closed")
    lost.suspects = (0, 2)
    with alive(store, 0):
        assert stopped_watch.report(lost) == "rank 2 stopped answering: the connection closed"


def test_watch_reports_the_failure_itself_where_all_suspects_are_alive(store, stopped_watch):
    lost = WorkerError("rank 2 sent another shape")
    lost.suspects = (0, 2)
    with alive(store, 0, 2):
        assert stopped_watch.report(lost) == "rank 2 sent another shape"


def test_watch_names_its_own_rank_for_an_error_in_the_users_code(stopped_watch):
    assert not stopped_watch.reported
    assert stopped_watch.report(ValueError("no such file")) == "rank 1 stopped: ValueError: no such file"
    assert stopped_watch.reported


@pytest.mark.parametrize(("agent", "rank", "hosts"), [("", 0, True), ("", 1, False), ("True", 0, False)])
def test_store_ends_with_rank_0_unless_torchrun_hosts_it(monkeypatch, agent, rank, hosts):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    assert lost_ranks.hosts_store(rank) is hosts


def test_last_rank_that_leaves_removes_the_keys_of_its_pipeline_and_no_others(monkeypatch):
    """Their number would grow with every pipeline of a job."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("other", "1")
    own = dist.PrefixStore("panpipe/meeting/1", store)
    first, last = (FailureWatch(rank, 2, store=own, owns_keys=True) for rank in range(2))
    first.stop()
    assert list(published_positions.PublishedPositions(1, 2, 5.0).left(own, [0])) == [0]
    last.stop()
    assert store.list_keys() == ["other"]
