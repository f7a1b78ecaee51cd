"""Arguments of calls by name, and those that are written in place."""

import torch
from panpipe.core.capture.graph.nodes import arguments_by_name, written_tensors, written_values

aten = torch.ops.aten


def test_arguments_have_their_names_and_defaults():
    x, y = torch.zeros(2), torch.ones(2)
    assert arguments_by_name(aten.add.Tensor, (x, y), {}) == {"self": x, "other": y, "alpha": 1}
    assert arguments_by_name(aten.add.Tensor, (x,), {"other": y, "alpha": 2}) == {"self": x, "other": y, "alpha": 2}
    assert arguments_by_name(len, (x,), {}) == {}


def test_written_tensors_are_found_by_position_by_name_and_in_lists():
    one, other, out = torch.zeros(2), torch.ones(2), torch.empty(2)
    assert [t is one for t in written_tensors(aten.add_.Tensor, (one, other), {})] == [True]
    assert [t is out for t in written_tensors(aten.add.out, (one, other), {"out": out})] == [True]
    found = written_tensors(aten._foreach_add_.Scalar, ([one, other], 1), {})
    assert [found[0] is one, found[1] is other] == [True, True]
    assert written_values(aten._foreach_add_.Scalar, ([1, 2], 1), {}) == [[1, 2]]
    assert written_tensors(aten.add.Tensor, (one, other), {}) == []
    assert written_tensors(len, (one,), {}) == []
