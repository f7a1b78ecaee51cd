"""What nodes of captured graphs write and show, on graphs made by hand."""

import operator

import pytest
import torch
from panpipe.core.capture.graph.nodes import always_views, is_view, module_of, note_roots, root_of, written_arguments

aten = torch.ops.aten


class Traced:
    """A graph of an input x, with its nodes by hand."""

    def __init__(self):
        self.graph = torch.fx.Graph()
        self.x = self.graph.placeholder("x")

    def call(self, target, *args, **kwargs):
        return self.graph.call_function(target, args, kwargs)


@pytest.fixture
def traced():
    return Traced()


def test_operators_write_what_their_schema_says(traced):
    y = traced.call(aten.relu.default, traced.x)
    assert written_arguments(y) == []
    assert written_arguments(traced.x) == []
    assert written_arguments(traced.call(aten.add_.Tensor, y, traced.x)) == [y]
    assert written_arguments(traced.call(aten.add.out, y, traced.x, out=y)) == [y]
    assert written_arguments(traced.call(aten._foreach_add_.Scalar, [traced.x, y], 1)) == [traced.x, y]
    assert written_arguments(traced.call(operator.getitem, y, 0)) == []


@pytest.mark.parametrize(("training", "written"), [(True, ["mean", "variance"]), (False, [])])
def test_normalisation_writes_its_statistics_in_training(traced, training, written):
    mean, variance = traced.graph.placeholder("mean"), traced.graph.placeholder("variance")
    norm = traced.call(aten.batch_norm.default, traced.x, None, None, mean, variance, training, 0.1, 1e-5, False)
    assert [node.name for node in written_arguments(norm)] == written
    bare = traced.call(aten.batch_norm.default, traced.x, None, None, None, None, training, 0.1, 1e-5, False)
    assert written_arguments(bare) == []


def test_views_show_what_they_are_given(traced):
    view = traced.call(aten.view.default, traced.x, [2])
    assert is_view(view)
    assert is_view(traced.call(aten.reshape.default, traced.x, [2]))
    assert not is_view(traced.call(aten.relu.default, traced.x))
    assert not is_view(traced.call(aten.relu_.default, traced.x))  # it writes: see `root_of`
    assert not is_view(traced.x)


@pytest.mark.parametrize(
    ("target", "views"),
    [
        (aten.view.default, True), (aten._unsafe_view.default, True), (aten.split.Tensor, True),
        (aten.relu.default, False), (operator.getitem, False),
    ],
)  # fmt: skip
def test_targets_that_always_return_views(target, views):
    assert always_views(target) == views


def test_root_of_views_parts_and_writes_is_the_tensor_that_they_show(traced):
    y = traced.call(aten.relu.default, traced.x)
    parts = traced.call(aten.split.Tensor, traced.call(aten.view.default, y, [2]), 1)
    part = traced.call(operator.getitem, parts, 1)
    assert root_of(part) is y
    assert root_of(traced.call(aten.mul_.Tensor, part, 2)) is y
    assert root_of(traced.x) is traced.x


def test_noted_roots_come_from_the_storages_of_a_run(traced):
    dropped = traced.call(aten.dropout.default, traced.x, 0.0, True)
    other = traced.call(aten.relu.default, dropped)
    pair = traced.call(aten.split.Tensor, other, 1)
    first = traced.call(operator.getitem, pair, 0)
    tensor, result = torch.zeros(2), torch.ones(2)
    values = {traced.x.name: tensor, dropped.name: tensor, other.name: result, pair.name: result.split(1), first.name: result[:1]}  # fmt: skip # noqa: E501
    note_roots(traced.graph, values)
    assert root_of(dropped) is traced.x
    assert root_of(first) is other


def test_module_of_a_node_is_the_innermost_without_the_wrapper(traced):
    y = traced.call(aten.relu.default, traced.x)
    assert module_of(y) == ""
    for stack, name in (
        ({"a": ("model", None)}, ""),
        ({"a": ("model", None), "b": ("model.blocks.0", None)}, "blocks.0"),
    ):
        y.meta["nn_module_stack"] = stack
        assert module_of(y) == name
