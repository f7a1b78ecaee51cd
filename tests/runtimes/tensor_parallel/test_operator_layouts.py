"""Layouts of the results of operators on one rank's plain tensors."""

import pytest
import torch
import torch.distributed as dist
from panpipe.runtimes.tensor_parallel.local_layouts import PARTIAL, UNKNOWN, WHOLE, LayoutError, Local
from panpipe.runtimes.tensor_parallel.operator_layouts import OperatorLayouts, layout_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

aten = torch.ops.aten


@pytest.fixture
def layouts():
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield OperatorLayouts(init_device_mesh("cpu", (2,)), FakeTensorMode())
    dist.destroy_process_group()


def of(layouts, func, args, given, one_process=None):
    """The layout of the first result; ``given`` are those of the tensors in the arguments."""
    out = func(*args)
    tensors = [each for each in args if isinstance(each, torch.Tensor)]
    results = [out] if isinstance(out, torch.Tensor) else [each for each in out if isinstance(each, torch.Tensor)]
    return layouts.of(func, args, {}, tensors, given, results, one_process)[0]


X = torch.randn(2, 6, 4)


@pytest.mark.parametrize(
    ("func", "args", "given", "wanted"),
    [
        (aten.relu.default, (X,), [Local(2)], Local(2)),
        (aten.add.Tensor, (X, X), [Local(2), Local(2)], Local(2)),
        (aten.add.Tensor, (X, torch.ones(4)), [Local(2), Local(same=frozenset({0}))], Local(2)),
        (aten.transpose.int, (X, 1, 2), [Local(2)], Local(1)),
        (aten.bmm.default, (X, X.transpose(1, 2)), [Local(2), Local(1)], PARTIAL),
        (aten.sum.dim_IntList, (X, [2]), [Local(2)], PARTIAL),
        (aten.sum.dim_IntList, (X, [1]), [Local(2)], Local(1)),
        (aten._softmax.default, (X, 1, False), [Local(2)], Local(2)),
        (aten.relu.default, (X,), [WHOLE], WHOLE),
        (aten.relu.default, (X,), [UNKNOWN], UNKNOWN),
        (aten.zeros_like.default, (X,), [Local(2)], Local(2)),
        (aten.detach.default, (X,), [PARTIAL], PARTIAL),
    ],
)
def test_part_of_what_one_process_computes(layouts, func, args, given, wanted):
    assert of(layouts, func, args, given) == wanted


@pytest.mark.parametrize(
    ("func", "args", "given"),
    [
        (aten._softmax.default, (X, 2, False), [Local(2)]),
        (aten.add.Tensor, (X, torch.ones(4)), [Local(2), WHOLE]),
        (aten.relu.default, (X,), [PARTIAL]),
        (aten.native_layer_norm.default, (X, [4], None, None, 1e-5), [Local(2)]),
        (aten.flip.default, (X, [2]), [Local(2)]),
    ],
)
def test_other_results_are_errors(layouts, func, args, given):
    with pytest.raises(LayoutError):
        of(layouts, func, args, given)


def test_views_have_the_shape_of_one_process(layouts):
    heads = (X, [2, 6, 2, 2])
    assert of(layouts, aten.view.default, heads, [Local(2)], (2, 6, 4, 2)) == Local(2)
    with pytest.raises(LayoutError):
        of(layouts, aten.view.default, heads, [Local(2)], (2, 6, 2, 4))


@pytest.mark.parametrize(
    ("placement", "layout"),
    [(Replicate(), WHOLE), (Partial(), PARTIAL), (Shard(1), Local(1))],
)
def test_layout_of_a_placement(placement, layout):
    assert layout_of(placement) == layout
