"""Collectives of tensor ranks as operators: their results, their gradients by hand, and shapes without values."""

import pytest
import torch
from panpipe.core.tensor_collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    SUM,
    OneRank,
)
from torch._subclasses.fake_tensor import FakeTensorMode


def test_rank_alone_sees_equal_ranks():
    part, whole = torch.tensor([[1.0, 2.0]]), torch.empty(3, 2)
    OneRank().all_gather(part, whole)
    assert whole.tolist() == [[1, 2]] * 3
    OneRank().reduce_scatter(whole, part)
    assert part.tolist() == [[1, 2]]


def test_shapes_are_known_without_values():
    with FakeTensorMode() as mode:
        given = mode.from_tensor(torch.ones(4, 3))
        results = ALL_REDUCE(given, SUM), ALL_GATHER(given, 2), REDUCE_SCATTER(given, 2)
        shapes = [tuple(each.shape) for each in results]
    assert shapes == [(4, 3), (8, 3), (2, 3)]


def test_collective_outside_of_a_step_is_an_error():
    with pytest.raises(RuntimeError, match="runs outside of a step: no ranks are known there"):
        ALL_REDUCE(torch.ones(1), SUM)
