"""The measured times of a small model on two threads: of its operators, and of the programs of its stages."""

import pytest
import torch
from attrs import evolve
from panpipe.core.costs.graph import OpNode
from panpipe.runtimes.batch.example import Example
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.planning import measurements as module
from panpipe.runtimes.planning.measurements import Measurements, _fastest_node
from panpipe.runtimes.programs.options import ProgramOptions

from ...support.cuts import captured_once
from ...support.stages.arranged import CASE, MICROBATCHES, ROWS, Arranged, step

BYTES = {"0.weight": 256, "0.bias": 32, "1.weight": 32, "1.bias": 32, "3.weight": 256, "3.bias": 32}


@pytest.fixture
def measured():
    made = Arranged()
    made.team.close()
    model = CASE.model(torch.float32)
    example = Example(model, step, made.pieces()[0], captured_once(CASE, torch.float32, ROWS, MICROBATCHES))
    team = ThreadTeam(2)
    found = Measurements(example, team, torch.optim.AdamW, ProgramOptions(known={}))
    yield found
    team.close()


def test_model_is_read_by_names(measured):
    assert measured.sizes == BYTES
    assert set(measured.buffers) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert measured.where == dict.fromkeys(range(2), torch.device("cpu"))
    assert measured.replicas is None


def test_operators_have_times_and_the_state_that_the_optimizer_keeps(measured):
    graph = measured.graph()
    operators = measured.operators.graph
    assert [node.name for node in graph.nodes] == [node.name for node in operators.nodes]
    assert all(node.forward_s > 0 for node in graph.nodes)
    # AdamW: parameter, gradient, two moments.
    assert sum(node.state_bytes for node in graph.nodes) == 4 * sum(BYTES.values())
    first = graph.nodes[0]
    assert first.parameters == ("0.weight", "0.bias")
    assert first.workspace_bytes >= 256  # its new gradient


def test_frozen_parameters_have_no_gradient_and_no_state(measured):
    for parameter in measured.example.model[0].parameters():
        parameter.requires_grad_(False)
    graph = measured._with_state(measured.operators.graph)
    assert graph.nodes[0].state_bytes == 256 + 32
    assert graph.nodes[0].gradient_bytes == 0
    assert sum(node.state_bytes for node in graph.nodes) == 288 + 4 * (sum(BYTES.values()) - 288)
    measured.example.model[0].bias.requires_grad_(True)
    first = measured._with_state(measured.operators.graph).nodes[0]
    assert (first.held_parameter_bytes, first.gradient_bytes, first.optimizer_bytes) == (288, 32, 64)


def test_times_are_the_shortest_over_devices(measured, monkeypatch):
    graph = measured.operators.graph

    def profiled(*_, device):
        factor = next(factors)
        return evolve(graph, nodes=tuple(evolve(node, forward_s=factor) for node in graph.nodes))

    factors = iter([1.0, 3.0])
    monkeypatch.setattr(module, "profile_operators", profiled)
    assert {node.forward_s for node in measured.graph().nodes} == {1.0}


def test_stages_have_costs_of_their_programs_and_are_kept(measured):
    names = [node.name for node in measured.operators.graph.nodes]
    stages = tuple(names[:2]), tuple(names[2:])
    costs = measured.costs_of(stages, derive=True)
    sums = measured.costs_of(stages)
    assert measured.costs == {stages: sums}
    for found in (costs, sums):
        assert all(cost.forward_s > 0 and cost.full_backward_s > 0 and cost.optimizer_s > 0 for cost in found)
        assert [cost.parameter_bytes for cost in found] == [256 + 32, 64 + 256 + 32]
    assert all(cost.workspace_bytes for cost in costs)
    assert len(measured.storages[stages]) == 2
    assert measured.example.model[0].weight.grad is None  # the model is read only
    assert {stage for stages_, stage, _ in measured.programs.known} == {0, 1}  # a pipeline need not derive them again


def test_fastest_of_an_operator_keeps_its_sizes():
    one, other = OpNode("a", 1.0, 5.0, 3.0, saved_bytes=5), OpNode("a", 3.0, 4.0, 5.0, saved_bytes=5)
    assert _fastest_node([one, other]) == OpNode("a", 1.0, 4.0, 3.0, saved_bytes=5)
