"""Sparse tensors and inference tensors: named where they are given or made."""

import pytest
import torch
from panpipe.core.capture.values.sparse_tensors import is_sparse, refuse_sparse_tensors
from panpipe.core.errors import RequestError
from torch import nn

SPARSE = torch.eye(2).to_sparse()


def model(**sparse):
    made = nn.Linear(2, 2)
    for name, tensor in sparse.items():
        made.register_buffer(name, tensor)
    return made


def test_sparse_is_what_is_not_strided():
    assert [is_sparse(value) for value in (SPARSE, torch.eye(2).t(), "x", None)] == [True, False, False, False]


@pytest.mark.parametrize(
    ("module", "batch", "name"),
    [
        (model(adjacency=SPARSE), {}, "buffer 'adjacency'"),
        (model(), {"x": [torch.eye(2), SPARSE]}, r"batch\['x'\]\[1\]"),
    ],
)
def test_sparse_tensor_of_the_model_or_the_batch_is_refused_by_name(module, batch, name):
    with pytest.raises(RequestError, match=rf"{name} is sparse \(torch.sparse_coo\)") as error:
        refuse_sparse_tensors(module, batch)
    assert "\n" not in str(error.value)


def test_sparse_parameter_is_refused_by_name():
    module = nn.Module()
    module.register_parameter("weight", nn.Parameter(SPARSE))
    with pytest.raises(RequestError, match="parameter 'weight' is sparse"):
        refuse_sparse_tensors(module, {})


def test_dense_model_and_batch_are_accepted():
    refuse_sparse_tensors(model(mask=torch.eye(2)), {"x": torch.eye(2), "name": "x"})


def test_model_that_was_built_under_inference_mode_is_refused_with_the_fix():
    with torch.inference_mode():
        module = model()
    with pytest.raises(
        RequestError, match=r"parameter 'weight' was created under torch.inference_mode\(\).*: build or"
    ):
        refuse_sparse_tensors(module, {})
