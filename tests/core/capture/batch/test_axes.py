"""Axes: the sets of dimensions and lists that may hold the samples."""

import torch
from panpipe.core.capture.batch.axes import Axis, AxisFinder, lists_of_samples, with_fewer_tensors
from panpipe.core.capture.batch.batch_dims import BatchDims


def axes(tensors, lists=None, known=None):
    named = {f"batch['{name}']": torch.empty(shape) for name, shape in tensors.items()}
    return AxisFinder(named, lists or {}, known or BatchDims(()), list(named)).axes()


def test_axes_along_dimension_0_with_most_tensors_come_first():
    found = axes({"x": (4, 6), "y": (4,), "mask": (6, 6)})
    assert dict(found[0].dims) == {"batch['x']": 0, "batch['y']": 0}
    assert found[0].rows == 4
    assert found[0].leading
    # 6 is the second dimension of x, or a dimension of the mask.
    assert {axis.rows for axis in found} == {4, 6}
    assert not found[-1].leading


def test_axes_have_the_size_of_a_known_dimension():
    known = BatchDims.of({"batch['x']": 1})
    found = axes({"x": (4, 6), "y": (4,), "mask": (6, 6)}, known=known)
    assert {axis.rows for axis in found} == {6}
    assert all(dict(axis.dims)["batch['x']"] == 1 for axis in found)


def test_axis_with_fewer_tensors_leaves_out_one_and_then_two():
    axis = Axis(4, (("a", 0), ("b", 0), ("c", 0)), frozenset(), 3)
    found = list(with_fewer_tensors(axis))
    assert [len(one.dims) for one in found] == [2, 2, 2, 1, 1, 1]
    assert dict(found[0].dims) == {"a": 0, "b": 0}  # the last tensor first
    assert list(with_fewer_tensors(Axis(4, (("a", 0),), frozenset(), 1))) == []


def test_lists_of_samples_have_equal_elements_with_tensors():
    sample = {"x": torch.empty(3)}
    assert list(lists_of_samples([sample, {"x": torch.empty(5)}], "batch")) == ["batch"]
    assert list(lists_of_samples({"items": [sample, sample]}, "batch")) == ["batch['items']"]
    assert lists_of_samples([1, 2], "batch") == {}
    assert lists_of_samples([torch.empty(2), torch.empty(2, 2)], "batch") == {}
