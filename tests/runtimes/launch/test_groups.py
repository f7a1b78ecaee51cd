"""The mesh of a ``DeviceMesh``, by its names and its table."""

from types import SimpleNamespace

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.options import mesh_from_torch


def mesh(table, *names):
    return SimpleNamespace(mesh=torch.tensor(table), mesh_dim_names=names or None)


def test_dimensions_are_known_by_name():
    found = mesh_from_torch(mesh([[0, 1, 2], [3, 4, 5]], "dp", "pp"))
    assert (found.pipeline, found.data) == (3, 2)
    assert found.cluster_devices == (0, 1, 2, 3, 4, 5)
    turned = mesh_from_torch(mesh([[0, 1, 2], [3, 4, 5]], "pp", "dp"))
    assert (turned.pipeline, turned.data) == (2, 3)
    assert turned.replicas == ((0, 3), (1, 4), (2, 5))


def test_missing_dimension_has_one_member():
    assert (mesh_from_torch(mesh([0, 1, 2], "pp")).pipeline, mesh_from_torch(mesh([0, 1, 2], "pp")).data) == (3, 1)
    assert (mesh_from_torch(mesh([0, 1], "dp")).pipeline, mesh_from_torch(mesh([0, 1], "dp")).data) == (1, 2)


def test_tensor_ranks_are_those_of_the_model():
    found = mesh_from_torch(mesh([[[0, 1]], [[2, 3]]], "dp", "pp", "tp"))
    assert (found.pipeline, found.data, found.tensor, found.pipeline_last) == (1, 2, 2, True)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (mesh([0, 1]), "the device mesh is 2 with dimensions without names: name them pp"),
        (mesh([[[0], [1]]], "pp", "dp", "cp"), "the device mesh is 1 × 2 × 1 with dimensions pp, dp, cp"),
        (mesh([[[0], [1]]], "pp", "cp", "tp"), "mesh 'pp=1,cp=2,tp=1' has a dimension 'cp'"),
    ],
)
def test_other_dimensions_are_refused(found, said):
    with pytest.raises(RequestError, match=said):
        mesh_from_torch(found)
