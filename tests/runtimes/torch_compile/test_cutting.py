"""Where a graph may be cut, which cut is balanced, and the stages as graphs."""

import operator

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.runtimes.torch_compile.cutting import _even, cut
from panpipe.runtimes.torch_compile.node_info import node_info
from torch import fx, nn
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

WIDTH = 4


def stages_of(graph, count, *arguments):
    return cut(graph, node_info(graph, arguments, {}), count)


def run(stages, outputs, *arguments):
    """The values of outputs, stage by stage."""
    known = {}
    for stage in stages:
        values = stage.module(*(arguments[place] for place in stage.arguments), *(known[n] for n in stage.incoming))
        known |= dict(zip(stage.outgoing, values, strict=True))
    return [known[node] for node in known if node.name in outputs]


def names(stage):
    return [node.name for node in stage.module.graph.nodes if node.op not in ("placeholder", "output")]


def test_stages_compute_what_the_graph_computes():
    def function(x, w, v):
        y = (x @ w).relu()
        return (y @ w).relu() @ v

    graph, arguments = fx.symbolic_trace(function), [torch.randn(WIDTH, WIDTH) for _ in range(3)]
    first, second = stages = stages_of(graph, 2, *arguments)
    assert names(first) + names(second) == ["matmul", "relu", "matmul_1", "relu_1", "matmul_2"]
    assert first.arguments == (0, 1)
    assert 2 in second.arguments
    assert [node.name for node in second.incoming] == [node.name for node in first.outgoing]
    assert torch.equal(run(stages, {"matmul_2"}, *arguments)[0], function(*arguments))


def test_skip_connection_goes_to_the_stage_that_reads_it():
    def function(x):
        first = x @ x
        return first @ x @ x @ x + first

    graph, x = fx.symbolic_trace(function), torch.randn(WIDTH, WIDTH)
    stages = stages_of(graph, 3, x)
    assert len(stages) == 3
    assert stages[0].outgoing[0].name == "matmul"
    assert "matmul" in [node.name for node in stages[2].incoming]
    torch.testing.assert_close(run(stages, {"add"}, x)[0], function(x))


def places(graph, count, *arguments):
    return [len(names(stage)) for stage in stages_of(graph, count, *arguments)]


def test_results_of_one_operator_stay_with_it():
    def function(x):
        first, second = x.chunk(2)
        return (first + second).relu().relu()

    stages = stages_of(fx.symbolic_trace(function), 6, torch.ones(WIDTH, 2))
    assert names(stages[0])[:3] == ["chunk", "getitem", "getitem_1"]


def test_context_of_autocast_is_not_cut():
    graph = fx.Graph()
    x = graph.placeholder("x")
    before = graph.call_function(torch.relu, (x,))
    entered = graph.call_function(_enter_autocast, ("cpu", torch.bfloat16, True, True))
    inner = graph.call_function(torch.matmul, (before, x))
    inner = graph.call_function(torch.matmul, (inner, x))
    graph.call_function(_exit_autocast, (entered,))
    graph.output((graph.call_function(operator.mul, (inner, 2)),))
    module = fx.GraphModule({}, graph)
    counts = places(module, 6, torch.ones(WIDTH, WIDTH))
    assert counts == [1, 4, 1]


def test_part_without_gradients_is_not_cut():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch._C._set_grad_enabled, (False,))
    y = graph.call_function(torch.relu, (x,))
    graph.call_function(torch._C._set_grad_enabled, (True,))
    z = graph.call_function(torch.relu, (y,))
    graph.output((graph.call_function(torch.relu, (z,)),))
    assert places(fx.GraphModule({}, graph), 6, torch.ones(2)) == [3, 1, 1]


def test_write_stays_with_earlier_uses_of_its_tensor():
    def function(x):
        y = x * 2
        z = y + 1
        y.add_(1)
        return (z + y) * 3

    assert places(fx.symbolic_trace(function), 6, torch.ones(2))[0] == 3


def test_written_argument_stays_with_all_of_its_uses():
    def function(x):
        x.add_(1)
        y = x * 2
        return (y + 1) * 2 * 2

    assert places(fx.symbolic_trace(function), 6, torch.ones(2))[0] == 2


def test_numbers_of_earlier_stages_are_computed_again():
    def function(x):
        n = x.shape[0]
        y = (x @ x).relu()
        return (y @ y) / n

    graph, x = fx.symbolic_trace(function), torch.ones(WIDTH, WIDTH)
    stages = stages_of(graph, 3, x)
    assert "getitem" in names(stages[-1])
    assert all(node.name not in ("getattr_1", "getitem") for stage in stages for node in stage.incoming)
    assert torch.equal(run(stages, {"truediv"}, x)[0], function(x))


def test_first_draw_of_a_stage_is_after_those_of_earlier_ones():
    def function(x):
        for _ in range(4):
            x = nn.functional.dropout(x @ x, 0.5)
        return x

    stages = stages_of(fx.symbolic_trace(function), 2, torch.ones(WIDTH, WIDTH))
    draws = [sum(name.startswith("dropout") for name in names(stage)) for stage in stages]
    assert [stage.first_draw for stage in stages] == [0, draws[0]]
    assert sum(draws) == 4


def test_one_stage_has_the_whole_graph():
    (stage,) = stages_of(fx.symbolic_trace(lambda x: x + 1), 1, torch.ones(2))
    assert names(stage) == ["add"]


def test_balanced_places_by_hand():
    assert _even([1, 1, 1, 1], [1, 2, 3], 2) == [2]
    assert _even([5, 1, 1, 1], [1, 2, 3], 2) == [1]
    assert _even([1, 1, 1, 1], [3], 2) == [3]
    assert _even([1, 1, 1, 1], [], 2) == []
    assert _even([1, 1, 1, 1], [1, 2, 3], 1) == []
    assert _even([1, 1, 1, 1], [1, 2, 3], 9) == [1, 2, 3]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 4))
@settings(max_examples=25)
def test_no_other_places_have_a_cheaper_stage(costs, stages):
    from itertools import combinations, pairwise

    def largest(places):
        return max(sum(costs[a:b]) for a, b in pairwise([0, *places, len(costs)]))

    every = range(1, len(costs))
    found = _even(costs, list(every), stages)
    assert len(found) < stages
    best = min(largest(some) for count in range(stages) for some in combinations(every, count))
    assert largest(found) == best
