"""Which ranks are lost, and the words for it, with a store whose documents change."""

import itertools
import os
import resource
import time

import pytest
from panpipe.core.errors import RequestError, WorkerError
from panpipe.runtimes.watch import watch
from panpipe.runtimes.watch.positions import Position
from panpipe.runtimes.watch.process import has_ended, process_here
from panpipe.runtimes.watch.watch import linger, reason_of

GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:28137"


class Store:
    """The job's store: ranks of ``alive`` publish whenever they are read, ranks of ``stop`` know a reason."""

    def __init__(self, alive=(), stop=()):
        self.alive, self.stop, self.numbers = alive, stop, itertools.count(1)

    def multi_get(self, keys):
        ranks = [int(key.rpartition("/")[2]) for key in keys]
        return [
            Position("", stops=rank in self.stop).document(next(self.numbers) if rank in self.alive else 0)
            for rank in ranks
        ]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(watch, "_SILENCE_S", 0.05)
    monkeypatch.setattr(watch, "_SHORT_POLL_S", 0.01)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


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
def test_reason_names_silent_ranks_or_what_this_rank_raised(failure, alive, said):
    assert reason_of(failure, 1, [0, 2], Store(alive)).startswith(said)


def test_host_of_the_store_lingers_until_others_know_the_reason_or_are_silent(monkeypatch):
    monkeypatch.setattr(watch, "_SILENCE_S", 0.5)
    start = time.monotonic()
    linger(Store(alive=(1,), stop=(1,)), 0, [1])
    at_once = time.monotonic() - start
    linger(Store(alive=(1,), stop=(1,)), 0, [1, 2])
    assert at_once < 0.5 <= time.monotonic() - start - at_once < 4


def test_host_of_the_store_lingers_with_a_reason_that_its_thread_has_read(monkeypatch):
    monkeypatch.setattr(watch, "_SILENCE_S", 0.5)
    own = watch.FailureWatch.__new__(watch.FailureWatch)
    own._first, own._reports = "rank 1 stopped answering", Store(alive=(1,), stop=(1,))
    own._rank, own._others = 0, [1, 2]
    start = time.monotonic()
    assert own.report(WorkerError("rank 1 stopped answering: reset")) == own._first
    assert time.monotonic() - start >= 0.5


def test_process_that_cannot_be_looked_up_has_not_ended(monkeypatch):
    here = process_here()
    absent = (here[0], 1 << 30)
    assert has_ended(absent, here)
    assert not has_ended(here, here)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        assert not has_ended(here, here)  # too many open files
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    monkeypatch.setattr(os, "getpid", lambda: absent[1])  # as where /proc is that of another namespace
    assert not has_ended(process_here(), process_here())
