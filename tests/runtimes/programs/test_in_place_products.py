"""A pass adds products of matrices to an input in place, where nothing reads the old value later."""

import pytest
import torch
from panpipe.runtimes.programs.in_place_products import InPlaceProducts
from torch import fx


@pytest.mark.parametrize("read_later", [False, True])
def test_products_are_added_in_place_to_an_input_that_nothing_reads_later(read_later):
    aten = torch.ops.aten
    graph = fx.Graph()
    total, left, right = (graph.placeholder(name) for name in ("total", "left", "right"))
    added = graph.call_function(aten.addmm.default, (total, left, right))
    result = graph.call_function(aten.neg.default, (total if read_later else left,))
    graph.call_function(aten.copy_.default, (total, added))
    graph.output((result,))
    InPlaceProducts()(graph)
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    assert targets == ([aten.addmm.default, aten.neg.default, aten.copy_.default] if read_later else
                       [aten.addmm_.default, aten.neg.default])  # fmt: skip
    given = [torch.ones(2, 2), torch.ones(2, 2), torch.eye(2)]
    (result,) = fx.GraphModule({}, graph)(*given)
    assert result.tolist() == [[-1, -1], [-1, -1]]
    assert given[0].tolist() == [[2, 2], [2, 2]]
