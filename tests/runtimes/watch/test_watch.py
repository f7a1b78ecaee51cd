"""The failure watch on one process's store: reasons, silent ranks. Its threads are stopped or short."""

import pytest
import torch.distributed as dist
from panpipe.core.errors import WorkerError
from panpipe.runtimes.watch import lost_ranks
from panpipe.runtimes.watch.lost_ranks import documents, numbered, position_key
from panpipe.runtimes.watch.positions import Position
from panpipe.runtimes.watch.watch import FailureWatch


@pytest.fixture
def store():
    """The store of four ranks that have arrived."""
    store = dist.HashStore()
    for rank in range(4):
        store.set(position_key(rank), Position("").document(0))
    return store


@pytest.fixture
def stopped_watch(store):
    """The watch of rank 1 of 3, whose threads have ended."""
    found = FailureWatch(store, 1, 3, 5.0)
    found.stop()
    return found


def test_rank_that_leaves_publishes_it_and_first_reason_is_that_of_all(store):
    first, second = FailureWatch(store, 1, 4, 5.0), FailureWatch(store, 3, 4, 5.0)
    first.stop()
    second.stop()
    left = {rank: Position.of_document(found).left for rank, found in documents(store, range(4)).items()}
    assert (left[0], left[2]) == (None, None)
    assert left[1] == left[3] in (" before it was built", " after pipeline()")  # another test built one in this process
    assert first.report(WorkerError("rank 2 stopped answering")) == "rank 2 stopped answering"
    assert second.report(WorkerError("rank 1 stopped answering")) == "rank 2 stopped answering"
    assert second.report(ValueError("its own")) == "rank 2 stopped answering"


def test_phrase_names_several_ranks():
    assert [numbered([2]), numbered([1, 2])] == ["rank 2", "ranks 1, 2"]


def test_watch_names_a_silent_rank_as_the_one_that_stopped(stopped_watch, monkeypatch):
    monkeypatch.setattr(lost_ranks, "silent", lambda store, ranks: [2])
    lost = WorkerError("the connection closed")
    lost.suspects = (0, 2)
    assert stopped_watch.report(lost) == "rank 2 stopped answering: the connection closed"


def test_watch_names_its_own_rank_for_an_error_in_the_users_code(stopped_watch):
    assert not stopped_watch.reported
    assert stopped_watch.report(ValueError("no such file")) == "rank 1 stopped: ValueError: no such file"
    assert stopped_watch.reported


@pytest.mark.parametrize(("agent", "rank", "hosts"), [("", 0, True), ("", 1, False), ("True", 0, False)])
def test_store_ends_with_rank_0_unless_torchrun_hosts_it(monkeypatch, agent, rank, hosts):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    assert lost_ranks.hosts_store(rank) is hosts
