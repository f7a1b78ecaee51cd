"""Tensors that a step writes and that are attributes of modules: they become buffers, others are refused."""

import pytest
import torch
from panpipe.core.capture.graph.checks import WritesConstant, make_buffer, make_constant_a_buffer
from panpipe.core.errors import RequestError
from torch import nn


def shared():
    model, table = nn.Sequential(nn.Identity(), nn.Identity()), torch.zeros(3)
    model[0].table = model[1].other = table
    return model, table


def test_tensor_becomes_a_buffer_of_every_module_that_has_it():
    model, table = shared()
    assert make_buffer(model, table)
    assert model[0].table is model[1].other is table
    assert [name for name, _ in model.named_buffers(remove_duplicate=False)] == ["0.table", "1.other"]
    assert not model.state_dict()  # not persistent


def test_tensor_of_no_module_becomes_none():
    model, _ = shared()
    assert not make_buffer(model, torch.zeros(3))
    assert not list(model.buffers())


def test_written_constant_is_found_by_its_memory():
    model, table = shared()
    make_constant_a_buffer(model, WritesConstant(table[:2], "model.py:3"))
    assert len(list(model.buffers())) == 1


@pytest.mark.parametrize(("line", "named"), [("model.py:3", "model.py:3"), ("", "the step")])
def test_written_constant_of_no_module_is_refused_with_its_line(line, named):
    with pytest.raises(RequestError, match=rf"{named}: the step writes a tensor \(4,\) in place that is not"):
        make_constant_a_buffer(nn.Identity(), WritesConstant(torch.zeros(4), line))
