"""A step as one process runs it, on a model with DTensors."""

import pytest
import torch
import torch.distributed as dist
from panpipe.runtimes.tensor_parallel.whole_run import WholeCalls, without_layouts
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def mesh():
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_layers_compute_with_whole_parameters_and_keep_their_layouts(mesh):
    model = parallelize_module(nn.Sequential(nn.Linear(4, 6, bias=False)), mesh, {"0": ColwiseParallel()})
    weight, x = torch.randn(6, 4), torch.randn(3, 4)
    with without_layouts(model, {"0.weight": weight}):
        assert torch.equal(model(x), x @ weight.T)
    assert model(x).shape == (3, 3)
    assert hasattr(model[0].weight, "placements")


def test_hooks_of_the_user_stay(mesh):
    model = parallelize_module(nn.Sequential(nn.Linear(4, 6)), mesh, {"0": ColwiseParallel()})
    seen = []
    model[0].register_forward_hook(lambda module, given, result: seen.append(tuple(result.shape)))
    with without_layouts(model, {"0.weight": torch.randn(6, 4), "0.bias": torch.randn(6)}):
        model(torch.randn(3, 4))
    assert seen == [(3, 6)]


def test_operators_are_found_by_the_call_that_runs_them():
    x = torch.randn(2, 3)
    with WholeCalls() as calls:
        torch.addmm(x[:, :2], x, x.T)
        torch.dropout(x, 0.5, train=True)
    found = list(calls.found.values())
    assert (aten.addmm.default, [(2, 2)]) in found
    assert [shapes for func, shapes in found if func is aten.native_dropout.default] in ([], [[(2, 3), (2, 3)]])
    assert len({number for number, _ in calls.found}) == 4  # of a slice, a transpose, a product, and a dropout


def test_copies_are_not_counted():
    """Where strides are other ones, ``reshape`` copies before a view."""
    x = torch.randn(2, 3)
    places = []
    for given in (x, x.T.contiguous().T):
        with WholeCalls() as calls:
            given.reshape(6)
        places.append(list(calls.found))
    assert places[0] == places[1]
