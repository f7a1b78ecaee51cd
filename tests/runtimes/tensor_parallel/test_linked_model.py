"""The user's model with DTensors and the plain model of this rank's parts, on a mesh of one rank."""

import pytest
import torch
import torch.distributed as dist
from panpipe.core.errors import RequestError
from panpipe.runtimes.tensor_parallel.layouts import LinkedModel, parts_of
from panpipe.runtimes.weights.remote_tensors import make_remote
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def linked(mesh):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Shard(0)]))
    parts = parts_of(model)
    return model, parts, LinkedModel(model, parts)


def named(parts):
    return dict(parts.named_parameters())


def test_gradients_of_parts_are_those_of_the_model(linked):
    model, parts, link = linked
    named(parts)["0.weight"].grad = torch.full((2, 2), 3.0)
    link.publish_gradients()
    gradient = model[0].weight.grad
    assert isinstance(gradient, DTensor)
    assert gradient.to_local().tolist() == [[3, 3], [3, 3]]
    assert gradient.placements == (Shard(0),)
    named(parts)["0.weight"].grad = None
    link.publish_gradients()
    assert model[0].weight.grad is None


def test_gradient_that_the_user_clears_is_cleared_in_the_parts(linked):
    model, parts, link = linked
    part = named(parts)["0.weight"]
    part.grad = torch.ones(2, 2)
    link.follow()
    assert part.grad is not None  # not published yet
    link.publish_gradients()
    link.follow()
    assert part.grad is not None
    model.zero_grad()
    link.follow()
    assert part.grad is None


def test_replaced_parameter_is_refused(linked):
    model, _, link = linked
    model[0].bias = nn.Parameter(torch.ones(2))
    with pytest.raises(RequestError, match=r"'0\.bias' was replaced: parameters and buffers of models with DTensors"):
        link.follow()


def test_frozen_parameter_is_refused(linked):
    model, _, link = linked
    model[0].weight.requires_grad_(False)
    with pytest.raises(RequestError, match=r"'0\.weight' was frozen: freeze parameters of models with DTensors before"):
        link.follow()
    model[0].weight.requires_grad_(True)
    link.follow()
    model[0].bias.requires_grad_(False)  # the same object in the parts
    link.follow()


def test_tensors_of_other_ranks_cannot_be_read_in_the_users_model(linked):
    model, parts, link = linked
    inner = parts.get_submodule("0")
    meta = nn.Parameter(torch.empty(1, 2, device="meta"))
    make_remote(meta, "0.weight", "rank 5")
    inner.weight = meta
    link.release()
    assert model[0].weight.shape == (2, 2)  # of the whole
    with pytest.raises(RequestError, match=r"'0\.weight'.*rank 5"):
        model[0].weight + 1
    assert not model[0].bias.is_meta
    link.follow()
