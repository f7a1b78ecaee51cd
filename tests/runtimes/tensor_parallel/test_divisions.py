"""Which part of a result a tensor rank has: operators run on a whole and on one of its parts."""

import pytest
import torch
from panpipe.runtimes.tensor_parallel.divisions import Division, Operands, divisions_of_results
from torch.utils import _pytree as pytree

aten = torch.ops.aten
RANKS, RANK = 2, 1


def part_of(whole, dim, outer=1):
    return whole.unflatten(dim, (outer, RANKS, -1)).select(dim + 1, RANK).flatten(dim, dim + 1)


def rand(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


class Given:
    """A tensor that is divided along a dimension of ``outer`` blocks; whole without one."""

    def __init__(self, whole, dim=None, outer=1):
        self.whole = whole
        self.part = whole if dim is None else part_of(whole, dim, outer).contiguous()
        self.division = None if dim is None else Division(dim, outer, tuple(whole.shape))


def found(func, of_whole, of_part=None):
    """The divisions of the results, and the results of the whole and of the part."""
    pick = lambda name, args: pytree.tree_map_only(Given, lambda each: getattr(each, name), args)  # noqa: E731
    of_part = of_whole if of_part is None else of_part
    given = [each for each in pytree.tree_leaves(of_part) if isinstance(each, Given)]
    wholes, parts = func(*pick("whole", of_whole)), func(*pick("part", of_part))
    wholes, parts = ([each] if isinstance(each, torch.Tensor) else list(each) for each in (wholes, parts))
    operands = Operands(
        [each.part for each in given], [(each.part, each.division) for each in given if each.division is not None]
    )
    shapes = [[tuple(each.shape) for each in results] for results in (parts, wholes)]
    return divisions_of_results(func, pick("part", of_part), {}, operands, *shapes, RANKS), wholes, parts


X = rand(3, 4, 5, 6)


@pytest.mark.parametrize(
    ("func", "args", "dim", "outer"),
    [
        (aten.add.Tensor, (Given(X, 1), Given(rand(5, 6))), 1, 1),
        (aten.add.Tensor, (Given(rand(4, 1, 6), 0), Given(X, 1)), 1, 1),
        (aten.mul.Scalar, (Given(X, 1, 2), 2.0), 1, 2),
        (aten.gelu.default, (Given(X, 3),), 3, 1),
        (aten._to_copy.default, (Given(X, 3),), 3, 1),
        (aten.transpose.int, (Given(X, 1), 1, -1), 3, 1),
        (aten.transpose.int, (Given(X, 1), 0, 2), 1, 1),
        (aten.t.default, (Given(rand(4, 3), 0),), 1, 1),
        (aten.permute.default, (Given(X, 1, 2), [0, 2, -1, 1]), 3, 2),
        (aten.unsqueeze.default, (Given(X, 1), 0), 2, 1),
        (aten._softmax.default, (Given(X, 1), -1, False), 1, 1),
        (aten.slice.Tensor, (Given(X, 1), 3, 0, 2), 1, 1),
        (aten.split.Tensor, (Given(X, 1), 3, -1), 1, 1),
        (aten.cat.default, ([Given(X, 1), Given(X + 1, 1)], 2), 1, 1),
        (aten.select.int, (Given(X, 1), 0, 0), 0, 1),
        (aten.select.int, (Given(X, 1), -1, 0), 1, 1),
        (aten.sum.dim_IntList, (Given(X, 3), [0, 1]), 1, 1),
        (aten.mean.dim, (Given(X, 1), [-1], True), 1, 1),
        (aten.native_layer_norm.default, (Given(X, 1), [6], Given(rand(6)), Given(rand(6)), 1e-5), 1, 1),
        (aten.mm.default, (Given(rand(4, 5), 0), Given(rand(5, 6))), 0, 1),
        (aten.mm.default, (Given(rand(3, 5)), Given(rand(5, 6), 1)), 1, 1),
        (aten.addmm.default, (Given(rand(6)), Given(rand(4, 5), 0), Given(rand(5, 6))), 0, 1),
        (aten.bmm.default, (Given(rand(4, 5, 6), 0, 2), Given(rand(4, 6, 3), 0, 2)), 0, 2),
    ],
)
def test_results_are_parts_of_the_results_of_the_whole(func, args, dim, outer):
    divisions, wholes, parts = found(func, args)
    assert len(divisions) == len(wholes) == len(parts)
    for division, whole, part in zip(divisions, wholes, parts, strict=True):
        assert division == Division(dim, outer, tuple(whole.shape))
        torch.testing.assert_close(part, part_of(whole, dim, outer))


@pytest.mark.parametrize(
    ("given", "whole", "part", "dim", "outer"),
    [
        (Given(X, 1), [12, 5, 6], [6, 5, 6], 0, 3),
        (Given(X, 1), [3, 20, 6], [3, 10, 6], 1, 1),
        (Given(rand(3, 5, 8), 2), [3, 5, 4, 2], [3, 5, 2, 2], 2, 1),
        (Given(rand(3, 5, 8), 2), [3, 5, 2, 4], [3, 5, 1, 4], 2, 1),  # one head of a rank
        (Given(rand(3, 5, 8), 2), [15, 8], [15, 4], 1, 1),
        (Given(rand(12, 5), 0, 3), [3, 4, 5], [3, 2, 5], 1, 1),
        (Given(rand(3, 4), 1, 2), [12], [6], 0, 6),
    ],
)
def test_views_keep_the_blocks(given, whole, part, dim, outer):
    divisions, (of_whole,), (of_part,) = found(aten.view.default, (given, whole), (given, part))
    assert divisions == [Division(dim, outer, tuple(whole))]
    assert torch.equal(of_part, part_of(of_whole, dim, outer))


def test_expanded_dimensions_are_before_the_divided_one():
    given = Given(rand(4, 1), 0)
    divisions, (whole,), (part,) = found(aten.expand.default, (given, [3, 4, 5]), (given, [3, 2, 5]))
    assert divisions == [Division(1, 1, (3, 4, 5))]
    assert torch.equal(part, part_of(whole, 1))


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.sum.dim_IntList, (Given(X, 1), [1])),
        (aten._softmax.default, (Given(X, 1), 1, False)),
        (aten.cat.default, ([Given(X, 1), Given(X, 1)], 1)),
        (aten.select.int, (Given(X, 1), 1, 0)),
        (aten.flip.default, (Given(X, 1), [1])),
        (aten.mm.default, (Given(rand(3, 4), 1), Given(rand(4, 5), 0))),
        (aten.add.Tensor, (Given(rand(4, 4), 0), Given(rand(4, 4), 0, 2))),
    ],
)
def test_other_results_are_not_known(func, args):
    assert found(func, args)[0] is None
