"""Tensors that a step writes and that are attributes of modules: they become buffers, others are refused."""

import pytest
import torch
from panpipe.core.capture.graph.checks import make_buffer
from panpipe.core.capture.values.capture_errors import WritesTensor
from panpipe.core.errors import RequestError
from torch import nn

LINE = "model.py:3"


def shared():
    model, table = nn.Sequential(nn.Identity(), nn.Identity()), torch.zeros(3)
    model[0].table = model[1].other = table
    return model, table


@pytest.mark.parametrize("written", [slice(None), slice(2)], ids=["itself", "a view"])
def test_tensor_becomes_a_buffer_of_every_module_that_has_it(written):
    model, table = shared()
    make_buffer(model, WritesTensor(table[written], LINE))
    assert model[0].table is model[1].other is table
    assert [name for name, _ in model.named_buffers(remove_duplicate=False)] == ["0.table", "1.other"]
    assert not model.state_dict()  # not persistent


@pytest.mark.parametrize(("line", "named"), [(LINE, LINE), ("", "the step")])
def test_tensor_of_no_module_is_refused_with_the_line_that_writes_it(line, named):
    with pytest.raises(RequestError, match=rf"{named}: the step writes a tensor \(4,\) in place that is not"):
        make_buffer(nn.Identity(), WritesTensor(torch.zeros(4), line))
