"""Collectives of tensor ranks as operators: their results, their gradients by hand, and shapes without values."""

import pytest
import torch
from panpipe.core.tensor_collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    MAX,
    OWN_PART,
    REDUCE_SCATTER,
    SUM,
    OneRank,
    communicating,
)
from torch._subclasses.fake_tensor import FakeTensorMode


class TwoRanks:
    """The other rank has ten times this rank's values."""

    rank = 1

    def all_reduce(self, part, operation):
        part.mul_(11.0 if operation == SUM else 10.0)

    def all_gather(self, part, whole):
        whole.copy_(torch.cat([part, 10 * part]))

    def reduce_scatter(self, whole, part):
        part.copy_(11 * whole[: part.shape[0]])


def of(operator, given, argument):
    """The result, and the gradient of its weighted sum with weights 1, 2, 3, …"""
    leaf = torch.tensor(given, requires_grad=True)
    with torch.enable_grad(), communicating(TwoRanks()):
        result = operator(leaf, argument)
        weights = torch.arange(1.0, result.numel() + 1).view(result.shape)
        (result * weights).sum().backward() if result.requires_grad else None
    return result.tolist(), None if leaf.grad is None else leaf.grad.tolist()


def test_gradient_of_a_sum_is_the_sum_of_the_gradients():
    assert of(ALL_REDUCE, [1.0, 2.0], SUM) == ([11, 22], [11, 22])


def test_gather_and_scatter_are_each_others_gradients():
    assert of(ALL_GATHER, [1.0, 2.0], 2) == ([1, 2, 10, 20], [11, 22])
    assert of(REDUCE_SCATTER, [1.0, 2.0, 3.0, 4.0], 2) == ([11, 22], [1, 2, 10, 20])


def test_own_part_is_that_of_each_block():
    whole = torch.arange(8.0)[:, None]
    with communicating(TwoRanks()):
        assert OWN_PART(whole, 0, 1, 2).flatten().tolist() == [4, 5, 6, 7]
        part = OWN_PART(whole, 0, 2, 2)
    assert part.flatten().tolist() == [2, 3, 6, 7]
    with FakeTensorMode() as mode:
        assert OWN_PART(mode.from_tensor(whole), 0, 2, 2).shape == part.shape


def test_maximum_has_no_gradient():
    leaf = torch.tensor([1.0, 2.0], requires_grad=True)
    with torch.enable_grad(), communicating(TwoRanks()):
        (ALL_REDUCE(leaf, MAX).sum() + leaf.sum()).backward()
    assert leaf.grad.tolist() == [1, 1]


def test_operators_do_not_change_what_they_are_given():
    given = torch.ones(2)
    with communicating(TwoRanks()):
        ALL_REDUCE(given, SUM)
    assert given.tolist() == [1, 1]


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


def test_innermost_context_runs_the_operators():
    with communicating(TwoRanks()), communicating(OneRank()):
        assert ALL_REDUCE(torch.ones(1), SUM).item() == 1
