"""Layouts of DTensor parameters, without ranks: which are supported, and the modules that hold the parts."""

from types import SimpleNamespace

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.tensor_parallel.layouts import DTensorLayout, check_layout, parts_of
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard


class Mesh:
    def __init__(self, ndim, size):
        self.ndim, self._size = ndim, size

    def size(self):
        return self._size

    def __str__(self):
        return f"a mesh of {self.ndim}"


def value(placement, ndim=1, size=2, shape=(4, 3)):
    return SimpleNamespace(device_mesh=Mesh(ndim, size), placements=(placement,), shape=torch.Size(shape))


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
def test_whole_and_even_parts_are_supported(placement):
    check_layout("w", value(placement), 2)


def test_uneven_and_partial_ones_are_refused():
    for placement in (Shard(1), Partial()):
        with pytest.raises(RequestError, match=r"'w' has shape \(4, 3\) and layout .* over 2 ranks: parts must"):
            check_layout("w", value(placement), 2)


@pytest.mark.parametrize(("ndim", "size"), [(2, 2), (1, 4)])
def test_other_meshes_are_refused(ndim, size):
    with pytest.raises(RequestError, match=rf"'w' is a DTensor on a mesh of {ndim}: --tp 2 needs a mesh of one dim"):
        check_layout("w", value(Replicate(), ndim, size), 2)


class Split(nn.Parameter):
    """A parameter of which this rank holds the first row, as a DTensor."""

    def detach(self):
        return SimpleNamespace(to_local=lambda: self.data[:1])

    def to_local(self):
        return self.data[:1]


def test_parts_have_the_names_of_the_model():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].weight = Split(torch.ones(2, 2), requires_grad=False)
    model[1].weight = model[0].bias
    parts = parts_of(model)
    found = dict(parts.named_parameters(remove_duplicate=False))
    assert set(found) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert found["0.weight"].shape == (1, 2)
    assert not found["0.weight"].requires_grad
    assert type(found["0.weight"]) is nn.Parameter
    assert found["0.bias"] is found["1.weight"] is model[0].bias
    buffers = dict(parts.named_buffers())
    assert buffers["1.running_mean"] is model[1].running_mean


def test_layout_of_a_part():
    whole = torch.ones(4, 3)
    given = SimpleNamespace(
        device_mesh="mesh", placements=(Shard(0),), shape=whole.shape, stride=whole.stride,
        detach=lambda: SimpleNamespace(to_local=lambda: torch.ones(3, 2).t()),
    )  # fmt: skip
    layout = DTensorLayout.of(given)
    assert (layout.shape, layout.stride, layout.part_shape, layout.part_stride) == ((4, 3), (3, 1), (2, 3), (1, 2))
    part = layout.part(torch.float64)
    assert (part.shape, part.stride(), part.dtype) == ((2, 3), (1, 2), torch.float64)
