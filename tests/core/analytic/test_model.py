"""Costs of a model from its kernels: what each operator saves first, sums, state, and times on a device."""

import pytest
import torch
from panpipe.core.analytic.model import (
    addition,
    costs_by_type,
    model_work,
    saved_values,
    tensor_reductions,
    with_state,
)
from panpipe.core.analytic.optimizers import find_optimizer
from panpipe.core.cluster.catalog import find_device
from torch import nn

from ...support.stages.graphs import operators

ROWS, WIDTH = 8, 16
HIDDEN = ROWS * WIDTH * 4
WEIGHT, BIAS = WIDTH * WIDTH, WIDTH


class Net(nn.Module):
    """Its first result is read twice; its last layer has the second one's weight, and is frozen in part."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.three.weight = self.two.weight
        self.one.bias.requires_grad_(False)

    def forward(self, x):
        x = self.one(x)
        return self.three(self.two(x).tanh() + x)


@pytest.fixture(scope="module")
def found():
    return operators(Net(), lambda model, batch: model(batch).square().mean(), torch.ones(ROWS, WIDTH))


@pytest.fixture(scope="module")
def work(found):
    return model_work(found)


@pytest.fixture(scope="module")
def by_name(found, work):
    return {node.name: each for node, each in zip(found.graph.nodes, work.operators, strict=True)}


def test_parameters_count_where_they_are_read_first(by_name):
    one, two, three = (by_name[f"{name}/linear"] for name in ("one", "two", "three"))
    assert (one.trained, one.frozen_bytes) == (((WEIGHT, 4),), BIAS * 4)
    assert (two.trained, two.frozen_bytes) == (((WEIGHT, 4), (BIAS, 4)), 0)
    assert three.trained == ((BIAS, 4),)


def test_graph_names_the_frozen_parameters(found):
    assert found.graph.frozen == {"one.bias"}


def test_result_that_two_read_sums_its_gradients_once(by_name):
    assert by_name["one/linear"].backward_input == (addition(ROWS * WIDTH, torch.float32),)
    assert by_name["two/linear"].backward_input == ()


def test_gradients_of_trained_parameters_are_added_to_earlier_ones(by_name):
    assert by_name["one/linear"].backward_weight == (addition(WEIGHT, torch.float32),)
    assert by_name["three/linear"].backward_weight == tuple(addition(n, torch.float32) for n in (WEIGHT, BIAS))


def test_addition_reads_two_tensors_and_writes_one():
    kernel = addition(10, torch.float64)
    assert (kernel.kind, kernel.bytes) == ("elementwise", 240)


def test_tensors_are_saved_by_the_first_that_needs_them(found, by_name):
    values = saved_values(found)
    assert sum(each.saved_bytes for each in by_name.values()) == sum(map(len, values.values())) * HIDDEN
    assert by_name["one/linear"].saved_bytes == 0  # of the batch
    assert len(values["two/linear"]) == 1  # its input, of the first layer
    assert all(each.workspace_bytes >= 0 for each in by_name.values())


def test_flops_are_those_of_products(work):
    product = 2 * ROWS * WIDTH * WIDTH
    assert work.flops == 3 * product * 3 - product  # the first layer has no gradient of its input
    assert work.number_type == "fp32"


def test_times_and_state_on_a_device(found, work):
    device = find_device("cpu-core")
    sgd, adam = (work.on(device, optimizer=find_optimizer(name)) for name in ("sgd", "adam"))
    first = sgd.nodes[0]
    assert first.forward_s > 0
    assert all(a.forward_s == b.forward_s for a, b in zip(sgd.nodes, adam.nodes, strict=True))
    state = {name: find_optimizer(name).state_bytes(4) for name in ("sgd", "adam")}
    assert sgd.nodes[0].state_bytes == WEIGHT * state["sgd"] + BIAS * 4
    assert adam.nodes[0].state_bytes == WEIGHT * state["adam"] + BIAS * 4
    assert [graph.nodes[0].gradient_bytes for graph in (sgd, adam)] == [WEIGHT * 4] * 2  # the bias is frozen
    moved = WEIGHT * find_optimizer("sgd").moved_bytes(4)
    bandwidth = device.peak_memory_bytes_per_s * device.efficiency["elementwise"]
    assert first.optimizer_s == pytest.approx(moved / bandwidth)


def test_graphs_by_type_and_measured_ones_with_state(found, work):
    device, chosen = find_device("cpu-core"), find_optimizer("sgd")
    graphs = costs_by_type(work, [device], optimizer=chosen)
    assert list(graphs) == [device.name]
    states = [node.state_bytes for node in graphs[device.name].nodes]
    measured = with_state(found.graph, found, chosen)
    assert [node.state_bytes for node in measured.nodes] == states
    assert [n.gradient_bytes for n in measured.nodes] == [n.gradient_bytes for n in graphs[device.name].nodes]
    assert [node.forward_s for node in measured.nodes] == [0] * len(states)


def test_model_without_tensor_ranks_has_no_reductions(found):
    assert set(tensor_reductions(found).values()) == {None}
