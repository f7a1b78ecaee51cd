"""Operators that are asked for sparse gradients, wherever the flag is in their arguments."""

import pytest
import torch
from panpipe.core.capture.graph.checks import refuse_sparse_gradients
from panpipe.core.errors import RequestError
from torch import fx

aten = torch.ops.aten


def call(target, *args, flows=True, **kwargs):
    graph = fx.Graph()
    source = graph.placeholder("weight")
    node = graph.call_function(target, (source, *args), kwargs)
    node.meta["nn_module_stack"] = {"a": ("model.words", None)}
    return [node], {"weight": torch.zeros(3, 2, requires_grad=flows)}


INDICES = torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize(
    "given",
    [call(aten.embedding.default, INDICES, -1, False, True), call(aten.gather.default, 0, INDICES, sparse_grad=True)],
    ids=["by position", "by name"],
)
def test_sparse_gradient_is_refused_with_its_module(given):
    with pytest.raises(RequestError, match=r"module 'words' asks aten\.\w+.* for sparse gradients: "):
        refuse_sparse_gradients(*given)


@pytest.mark.parametrize(
    "given",
    [
        call(aten.embedding.default, INDICES, -1, False, False),
        call(aten.embedding.default, INDICES),
        call(aten.gather.default, 0, INDICES, sparse_grad=False),
        call(aten.embedding.default, INDICES, -1, False, True, flows=False),
        call(aten.relu.default),
    ],
    ids=["dense by position", "dense by default", "dense by name", "frozen", "no flag"],
)
def test_dense_and_frozen_are_accepted(given):
    refuse_sparse_gradients(*given)
