"""Limits on NCCL's communicators, and the calls of one: a process group that records them."""

from types import SimpleNamespace

import pytest
import torch
from panpipe.backends.nccl_groups import (
    MOST_COMMUNICATORS,
    PAIR_VARIABLE,
    NcclCommunicator,
    check_count,
    thread_blocks,
)
from panpipe.core.errors import RequestError


def test_thread_blocks_are_those_of_the_environment(monkeypatch):
    monkeypatch.delenv(PAIR_VARIABLE, raising=False)
    assert thread_blocks(PAIR_VARIABLE, 4) == 4
    for given in ("1", "64"):
        monkeypatch.setenv(PAIR_VARIABLE, given)
        assert thread_blocks(PAIR_VARIABLE, 4) == int(given)


@pytest.mark.parametrize("given", ["0", "65", "-1", "many", "2.5", ""])
def test_other_thread_blocks_are_refused(monkeypatch, given):
    monkeypatch.setenv(PAIR_VARIABLE, given)
    with pytest.raises(RequestError, match=f"{PAIR_VARIABLE} is '{given}': a communicator takes 1 to 64 thread blocks"):
        thread_blocks(PAIR_VARIABLE, 4)


def test_more_communicators_than_streams_are_refused():
    check_count(MOST_COMMUNICATORS - 3, 3)
    with pytest.raises(
        RequestError, match="this rank needs 30 more NCCL communicators, 3 are open and PyTorch has str"
    ):
        check_count(MOST_COMMUNICATORS - 2, 3)


class Group:
    """Records the calls of a process group, and the waits for them."""

    def __init__(self, done=False):
        self.calls, self.waits, self._done = [], 0, done

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, *arguments))
            return None if self._done else SimpleNamespace(wait=self._waited)

        return call

    def _waited(self):
        self.waits += 1


@pytest.fixture
def made():
    communicator = NcclCommunicator.__new__(NcclCommunicator)
    communicator._place, communicator._count, communicator._group = 1, 3, Group()
    return communicator


def test_messages_make_the_current_stream_wait(made):
    x = torch.ones(2)
    made.send(x, 2)
    made.receive(x, 0)
    assert made._group.calls == [("send", [x], 2, 0), ("recv", [x], 0, 0)]
    assert made._group.waits == 2


def test_sums_run_on_the_current_stream(made):
    x = torch.ones(6)
    made.all_reduce(x)
    ((name, (summed,), options),) = made._group.calls
    assert (name, summed is x, options.asyncOp) == ("allreduce", True, False)
    made._group = Group(done=True)  # it ran on the current stream
    made.all_reduce(x)


def test_parts_are_those_of_this_rank(made):
    x = torch.arange(6.0)
    made.reduce_scatter(x)
    made.all_gather(x)
    (first, part, whole, _), (second, gathered, own, _) = made._group.calls
    assert (first, second) == ("_reduce_scatter_base", "_allgather_base")
    assert part.tolist() == own.tolist() == [2.0, 3.0]
    assert whole is x
    assert gathered is x
    assert part.data_ptr() == x.data_ptr() + 8


def test_empty_parts_are_not_sent(made):
    made.reduce_scatter(torch.ones(0))
    made.all_gather(torch.ones(0))
    assert made._group.calls == []


def test_broadcast_is_from_its_rank(made):
    made.broadcast(torch.ones(2), 2)
    ((name, _, options),) = made._group.calls
    assert (name, options.rootRank, options.rootTensor, options.asyncOp) == ("broadcast", 2, 0, False)
    made.close()
    assert made._group.calls[-1] == ("shutdown",)
