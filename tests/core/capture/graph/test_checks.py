"""Tests of values are erased from graphs, and what only they read."""

import torch
from panpipe.core.capture.graph.checks import depends_on_values, drop_checks
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

aten = torch.ops.aten


def unknown():
    """A tensor whose size depends on values, and that size."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        found = torch.ones(4).nonzero()
    return found, found.shape[0]


def graph_of():
    """x is doubled; how many of it are not zero is tested, and something without a value hangs on that."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    many, count = unknown()
    found = graph.call_function(aten.nonzero.default, (x,))
    found.meta["val"] = many
    size = graph.call_function(aten.sym_size.int, (found, 0))
    size.meta["val"] = count
    graph.call_function(aten._assert_scalar.default, (size, "too many"))
    twice = graph.call_function(aten.mul.Tensor, (x, 2))
    twice.meta["val"] = torch.ones(4)
    graph.output(twice)
    return graph, found, size, twice


def test_values_that_are_known_late_are_sizes_and_numbers():
    _, found, size, twice = graph_of()
    assert [depends_on_values(node) for node in (found, size, twice)] == [True, True, False]
    twice.meta["val"] = (torch.ones(1), [found.meta["val"]])
    assert depends_on_values(twice)


def test_tests_are_erased_with_all_that_only_they_read():
    graph, _, _, twice = graph_of()
    drop_checks(graph)
    graph.lint()
    assert [node for node in graph.nodes if node.op == "call_function"] == [twice]


def test_unused_results_that_are_known_stay_and_those_that_could_not_run_go():
    graph, _, _, twice = graph_of()
    with graph.inserting_after(twice):
        unused = graph.call_function(aten.relu.default, (twice,))
        unused.meta["val"] = torch.ones(4)
        graph.call_function(aten.neg.default, (twice,))
    drop_checks(graph)
    assert [node for node in graph.nodes if node.op == "call_function"] == [twice, unused]
