"""Ranks meet, and one that is missing is named; the first reason to stop is everybody's. On one process's store."""

import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from panpipe.backends import gloo
from panpipe.core.errors import RequestError, WorkerError
from panpipe.runtimes.launch import arrival
from panpipe.runtimes.launch.rank_team import RankTeam
from panpipe.runtimes.watch import timeout
from panpipe.runtimes.watch.positions import UNKNOWN, Position
from panpipe.runtimes.watch.published_positions import PublishedPositions
from panpipe.runtimes.watch.watch import FailureWatch


@pytest.fixture
def store():
    return dist.HashStore()


def test_missing_ranks_are_named_on_all_ranks_that_arrived(store):
    told = {}

    def come(rank):
        try:
            arrival._meet(store, rank, 4, 0.3)
        except WorkerError as error:
            told[rank] = str(error)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (1, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told[1] == told[3]
    assert told[1].startswith("ranks 0, 2 of 4 did not arrive within 0.3 s: ")


def test_rank_that_is_connected_may_arrive_after_the_limit(store):
    """The watch names it if it hangs."""
    PublishedPositions(0, 2, 5).write(store, Position("in the start of the pipeline"), 0)
    late = threading.Timer(1.0, arrival._meet, (store, 0, 2, 5))
    late.start()
    arrival._meet(store, 1, 2, 0.3)
    late.join()


def test_ranks_continue_when_all_have_arrived(store):
    late = threading.Timer(0.2, arrival._meet, (store, 0, 2, 5))
    late.start()
    arrival._meet(store, 1, 2, 5)
    late.join()


def test_rank_that_missed_an_earlier_group_joins_the_next(store):
    for size in (2, 3):
        group = dist.PrefixStore(str(size), store)
        threads = [threading.Thread(target=arrival._meet, args=(group, rank, size, 5)) for rank in range(1, size)]
        for thread in threads:
            thread.start()
        arrival._meet(group, 0, size, 5)
        for thread in threads:
            thread.join()


def test_first_failure_reason_is_raised_on_all_ranks(store, monkeypatch):
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    first, second = FailureWatch(1, 4), FailureWatch(3, 4)
    first.stop()
    second.stop()
    published = PublishedPositions(0, 4, 5)
    assert published.absent(store, [0, 1, 2, 3]) == [0, 2]  # the others have a position as soon as they are connected
    assert published.host(store) == UNKNOWN
    assert first.report(WorkerError("rank 2 stopped answering")) == "rank 2 stopped answering"
    assert second.report(WorkerError("rank 1 stopped answering")) == "rank 2 stopped answering"
    assert second.report(ValueError("its own")) == "rank 2 stopped answering"


@pytest.mark.parametrize("given", ["soon", "0", "-1", "nan", "inf", ""])
def test_invalid_limit_of_the_environment_is_refused(monkeypatch, given):
    monkeypatch.setenv(timeout.VARIABLE, given)
    with pytest.raises(RequestError, match=f"PANPIPE_TIMEOUT_S is '{given}'.*a finite number of seconds above 0"):
        timeout.timeout_of(None)


@pytest.mark.parametrize("given", ["soon", 0, -1.0, float("nan"), float("inf"), True])
def test_invalid_limit_of_an_argument_is_refused(monkeypatch, given):
    with pytest.raises(RequestError, match=r"timeout_s is .*: give a finite number of seconds above 0"):
        timeout.timeout_of(given)


def test_limit_is_the_arguments_then_the_environments_then_300_s(monkeypatch):
    monkeypatch.delenv(timeout.VARIABLE, raising=False)
    assert timeout.timeout_of(None) == 300
    monkeypatch.setenv(timeout.VARIABLE, "20")
    assert (timeout.timeout_of(None), timeout.timeout_of(5)) == (20, 5)


def test_rank_that_ends_while_the_group_is_created_is_named(store, monkeypatch):
    def lose(*_, **__):
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lose)
    store.set("arrived/0", "")
    watch = SimpleNamespace(report=lambda failure: "rank 0 stopped answering: its process ended")
    meeting = SimpleNamespace(rank=1, size=2, store=lambda: store, watch=watch, met=None)
    with pytest.raises(WorkerError, match=r"\Arank 0 stopped answering: its process ended\Z"):
        RankTeam(gloo.KIND, 5, meeting=meeting)
