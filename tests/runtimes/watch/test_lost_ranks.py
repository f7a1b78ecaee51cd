"""Which ranks are lost, and the words for it, with a store that is a dict."""

import collections
import time

import pytest
import torch.distributed as dist
from panpipe.core.errors import RequestError, WorkerError
from panpipe.runtimes.watch import lost_ranks
from panpipe.runtimes.watch.lost_ranks import (
    Heartbeats,
    acknowledge,
    beat,
    hosts_store,
    linger,
    not_arrived,
    reason_of,
    store_ended,
)

GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:28137"


class Store(collections.Counter):
    """The job's store; ranks of ``alive`` beat whenever a count is read."""

    alive = ()

    def add(self, key, number):
        self[key] += number or int(key.rpartition("/")[2]) in self.alive
        return self[key]


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(lost_ranks, "_SILENCE_S", 0.05)
    monkeypatch.setattr(lost_ranks, "_POLL_S", 0.01)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return Store()


def test_heartbeats_are_counted_by_rank(store):
    assert [beat(store, 1), beat(store, 1), beat(store, 2)] == [1, 2, 1]


def test_ranks_without_a_heartbeat_are_silent(store):
    store.alive = (0, 2)
    assert Heartbeats(store, [0, 1, 2]).silent() == [1]
    assert Heartbeats(store, [0, 2]).silent() == []


def test_ranks_that_were_heard_lately_are_not_silent(store, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(lost_ranks.time, "monotonic", lambda: now[0])
    beats = Heartbeats(store, [0, 1])
    assert beats.not_silent() == [0, 1]  # nobody can be yet
    now[0] += 1.0
    beat(store, 0)
    assert beats.not_silent() == [0]


@pytest.mark.parametrize(
    ("failure", "alive", "said"),
    [
        (RuntimeError(GLOO), (2,), "rank 0 stopped answering: its connection closed"),
        (RuntimeError(GLOO), (), "ranks 0, 2 stopped answering: its connection closed"),
        (RuntimeError(GLOO), (0, 2), "ranks 0, 2 stopped answering rank 1: its connection closed"),
        (WorkerError("one of ranks 0, 2 stopped answering: reset", (0, 2)), (0,), "rank 2 stopped answering: "),
        (WorkerError("rank 2 stopped answering: reset"), (), "rank 2 stopped answering: reset"),
        (RuntimeError("out of range"), (0, 2), "rank 1 stopped: RuntimeError: out of range"),
        (ValueError("no such sample"), (), "rank 1 stopped: ValueError: no such sample"),
        (RequestError("the batch has 0 samples"), (), "rank 1 stopped: RequestError: the batch has 0 samples"),
    ],
)
def test_reason_names_silent_ranks_or_what_this_rank_raised(store, failure, alive, said):
    store.alive = alive
    assert reason_of(failure, 1, [0, 2], store).startswith(said)


def test_cause_of_a_transports_failure_is_the_reason(store):
    failure = WorkerError("one of ranks 0, 2 stopped answering", (0, 2))
    failure.__cause__ = RuntimeError(GLOO)
    assert reason_of(failure, 1, [0, 2], store) == "ranks 0, 2 stopped answering: its connection closed"


def test_absent_ranks_are_named_with_their_time_and_the_fix():
    assert not_arrived([1, 3], 4, 30.0).startswith("ranks 1, 3 of 4 did not arrive within 30 s: every rank must call")


@pytest.mark.parametrize(
    ("agent", "hosts", "said"), [("True", False, "the process that started"), ("", True, "rank 0 stopped")]
)
def test_host_of_the_store_is_the_launcher_or_rank_0(monkeypatch, agent, hosts, said):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    assert [hosts_store(0), hosts_store(1)] == [hosts, False]
    assert store_ended().startswith(said)


def test_host_of_the_store_lingers_until_others_have_read_the_reason_or_are_silent(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(lost_ranks, "LINGER_S", 20.0)
    monkeypatch.setattr(lost_ranks, "_SILENCE_S", 30.0)
    acknowledge(store, 1)
    start = time.monotonic()
    linger(store, [1])
    at_once = time.monotonic() - start
    monkeypatch.setattr(lost_ranks, "_SILENCE_S", 0.5)
    start = time.monotonic()
    linger(store, [1, 2])
    silent = time.monotonic() - start
    assert at_once < 10
    assert 0.5 <= silent < 15
