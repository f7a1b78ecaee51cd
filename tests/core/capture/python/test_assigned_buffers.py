"""Buffers that a step assigns: written into the old tensors at the end, restored, or refused."""

import pytest
import torch
from panpipe.core.capture.python.assigned_buffers import assigned_buffers_written
from panpipe.core.errors import RequestError
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


@pytest.fixture
def model():
    inner = nn.Module()
    inner.register_buffer("mean", torch.zeros(2))
    inner.register_buffer("last", torch.ones(2))
    inner.register_buffer("table", torch.zeros(3), persistent=False)
    inner.register_buffer("none", None)
    found = nn.Module()
    found.inner = inner
    return found


def test_assigned_values_are_written_into_the_old_tensors(model):
    inner, names = model.inner, {"left over"}
    mean, last = inner.mean, inner.last
    with assigned_buffers_written(model, names):
        inner.mean, inner.last = last, mean + 5  # one gets the other's old value
    assert (inner.mean is mean, inner.last is last) == (True, True)
    assert (mean.tolist(), last.tolist()) == ([1, 1], [5, 5])
    assert names == {"inner.mean", "inner.last"}


def test_buffers_that_are_not_assigned_stay(model):
    names = set()
    with assigned_buffers_written(model, names):
        model.inner.mean.add_(1)
    assert (names, model.inner.mean.tolist()) == (set(), [1, 1])


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("mean", torch.zeros(3), r"assigns torch.float32 \(3,\) to buffer 'inner.mean', which is torch.float32 \(2,\)"),
        ("mean", torch.zeros(2).double(), r"assigns torch.float64 \(2,\) to buffer 'inner.mean'"),
        ("mean", None, "assigns None to buffer 'inner.mean'"),
        ("table", torch.zeros(4), r"register a table that grows with persistent=False"),
    ],
)
def test_other_shapes_and_dtypes_are_refused(model, name, value, said):
    with pytest.raises(RequestError, match=said), assigned_buffers_written(model, set(), lambda value: False):
        setattr(model.inner, name, value)


def test_table_that_grows_is_restored(model):
    table = model.inner.table
    with assigned_buffers_written(model, set()):
        model.inner.table = torch.zeros(4)
    assert model.inner.table is table


def test_captured_buffer_that_is_new_is_removed(model):
    with FakeTensorMode():
        captured = torch.ones(2)
    with assigned_buffers_written(model, set()):
        model.inner.register_buffer("new", captured, persistent=False)
        model.inner.none = captured
    assert "new" not in dict(model.inner.named_buffers())
    assert model.inner.none is None


def test_new_buffer_of_the_users_own_stays(model):
    with assigned_buffers_written(model, set()):
        model.inner.register_buffer("own", torch.ones(2))
    assert model.inner.own.tolist() == [1, 1]
