"""One operator of a captured step on its own: what it reads and returns, when two are alike, and its graph."""

import pytest
import torch
from panpipe.core.analytic.single_operator import LoneOperator, is_copy
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from torch import fx, nn


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.wide = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 6)

    def forward(self, x):
        x = nn.functional.dropout(self.two(self.one(x)), 0.5)
        return self.wide(nn.functional.dropout(x, 0.5))


@pytest.fixture(scope="module")
def operators():
    with torch.enable_grad():
        return operators_of(capture_step(Layers(), lambda m, x: m(x).square().mean(), torch.zeros(2, 4)))


@pytest.fixture(scope="module")
def alone(operators):
    return [LoneOperator(operators, node.name) for node in operators.graph.nodes]


def kinds(operator):
    return {str(node.target) for node in operator.members}


def linears(alone):
    return [one for one in alone if "aten.linear.default" in kinds(one)]


def test_inputs_of_other_operators_come_first(alone):
    first, second, third = linears(alone)
    for one in (second, third):
        assert len(one.activations) == 1
        assert one.given[: len(one.activations)] == one.activations
    assert not first.activations  # it reads the batch


def test_parameters_are_fixed_and_the_batch_and_activations_are_not(operators, alone):
    for one in linears(alone):
        named = dict(zip([node.name for node in one.given], one.fixed, strict=True))
        assert {name for name, fixed in named.items() if fixed} == set(named) & set(operators.step.parameters)
        assert sum(named.values()) == 2


def test_results_are_what_other_operators_or_the_step_read(operators, alone):
    assert [node.name for node in alone[-1].returned] == [operators.step.outputs.loss]
    read = {node for one in alone for node in one.activations}
    for one in alone[:-1]:
        assert set(one.returned) == read & set(one.members)


def test_operators_of_equal_work_have_equal_keys(alone):
    first, second, third = linears(alone)
    assert second.key != third.key  # another width
    assert first.key != second.key  # reads the batch, which gets no gradient
    dropouts = [one for one in alone if any("dropout" in kind for kind in kinds(one))]
    assert len({one.key for one in dropouts}) <= len(dropouts)
    assert len({one.key for one in alone}) > 1


def test_graph_runs_alone_with_a_copy_of_each_result(alone):
    _, second, _ = linears(alone)
    graph = second.graph()
    assert [tuple(fake.shape) for fake in graph.fakes[:3]] == [tuple(x) for x in ((2, 4), (4, 4), (4,))]
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    assert all(is_copy(node) for node in output.args[0])
    if not graph.first_draw:
        x, weight, bias = torch.ones(2, 4), torch.eye(4), torch.ones(4)
        (found,) = fx.Interpreter(fx.GraphModule(graph.modules, graph.graph)).run(x, weight, bias)
        assert found.tolist() == [[2.0] * 4] * 2


def test_random_operator_gets_a_key(operators, alone):
    random = [one for one in alone if any(node.name in operators.first_draw for node in one.members)]
    assert random
    graph = random[0].graph()
    assert graph.inputs.random
    assert (graph.fakes[-1].shape, graph.fakes[-1].dtype) == ((3,), torch.int64)
    assert len(graph.first_draw) == 1
