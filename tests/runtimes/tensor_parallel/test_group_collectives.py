"""Collectives of tensor ranks over a process group of one rank, and of a group whose other rank is gone."""

import pytest
import torch
import torch.distributed as dist
from panpipe.core.capture.graph.tensor_collectives import MAX, SUM
from panpipe.core.errors import WorkerError
from panpipe.runtimes.tensor_parallel.group_collectives import GroupCollectives


@pytest.fixture
def calls(monkeypatch):
    """The calls of torch.distributed, as rank 1 of a group of ranks 1 and 3; each fails once ``fail`` is in it."""
    found = []

    def called(name):
        def call(*args, group):
            assert group == "group"
            found.append((name, *args))
            if "fail" in found:
                raise RuntimeError("Connection closed by peer")

        return call

    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_gather"):
        monkeypatch.setattr(dist, name, called(name))
    return found


@pytest.fixture
def group(calls):
    return GroupCollectives((1, 3), "group")


@pytest.mark.parametrize(("name", "operation"), [(SUM, dist.ReduceOp.SUM), (MAX, dist.ReduceOp.MAX)])
def test_all_reduce_has_its_operation(group, calls, name, operation):
    part = torch.ones(2)
    group.all_reduce(part, name)
    ((kind, given, reduced),) = calls
    assert kind == "all_reduce"
    assert given is part
    assert reduced == operation


def test_rank_is_its_place_in_the_group(group):
    assert group.rank == 0


def test_whole_and_part_have_their_places(group, calls):
    part, whole = torch.ones(1), torch.ones(2)
    group.all_gather(part, whole)
    group.reduce_scatter(whole, part)
    (first, a, b), (second, c, d) = calls
    assert (first, second) == ("all_gather_into_tensor", "reduce_scatter_tensor")
    assert (a is whole, b is part) == (True, True)
    assert (c is part, d is whole) == (True, True)


def test_parts_are_gathered_as_bytes(group, monkeypatch):
    def all_gather(of_all, data, group):
        assert data.dtype == torch.uint8
        of_all[0].copy_(data)
        of_all[1].copy_(data.flip(0))

    monkeypatch.setattr(dist, "all_gather", all_gather)
    own, other = group.gather_parts(torch.tensor([[1, 2]], dtype=torch.uint8).t().to(torch.int8))
    assert own.tolist() == [[1], [2]]
    assert other.tolist() == [[2], [1]]
    assert own.dtype == torch.int8


def test_failure_names_the_other_ranks(group, calls):
    calls.append("fail")
    with pytest.raises(WorkerError, match=r"3.*Connection closed by peer"):
        group.all_reduce(torch.ones(1), SUM)
