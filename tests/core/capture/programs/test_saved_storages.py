"""The storages of saved tensors: names, sizes, views of one storage, and what else holds them."""

import operator

import pytest
import torch
from panpipe.core.capture.programs.joint_graph import CAPTURED
from panpipe.core.capture.programs.stage import Boundary, StageInputs
from panpipe.core.capture.programs.stage_programs import SavedStorage, python_reads, saved_storages
from torch import fx

RUN = torch.ops.panpipe_region.run.default


@pytest.fixture
def graph():
    return fx.Graph()


def node(graph, origin=None, target=torch.relu, *arguments):
    made = graph.call_function(target, arguments)
    if origin is not None:
        made.meta[CAPTURED] = origin
    return made


def storages(nodes, values, boundary=(), persistent=(), outputs=(), read=()):
    each = tuple(Boundary(name, tuple(value.shape), value.dtype, True) for name, value in boundary)
    given = [*(value for _, value in boundary), *persistent]
    return saved_storages(nodes, values, StageInputs(each, (), (), (), (), False), given, outputs, read)


def test_views_of_one_storage_are_one(graph):
    base, other = torch.zeros(4), torch.zeros(3, dtype=torch.float64)
    nodes = [node(graph, "linear"), node(graph, "view"), node(graph, "exp")]
    assert storages(nodes, [base, base[1:], other]) == (
        SavedStorage("linear", "linear", 16, (0, 1)),
        SavedStorage("exp", "exp", 24, (2,)),
    )


def test_storages_of_one_value_are_numbered(graph):
    nodes = [node(graph, "norm") for _ in range(3)]
    found = storages(nodes, [torch.zeros(1), torch.zeros(2), torch.zeros(3)])
    assert [each.name for each in found] == ["norm", "norm:1", "norm:2"]
    assert {each.origin for each in found} == {"norm"}


def test_value_that_the_trace_does_not_know_has_the_nodes_name(graph):
    one = node(graph)
    assert storages([one], [torch.zeros(1)]) == (SavedStorage(one.name, None, 4, (0,)),)


def test_parameters_numbers_and_the_batch_are_not_among_them(graph):
    weight = torch.zeros(4)
    nodes = [node(graph, name) for name in ("t", "size", "linear")]
    found = storages(nodes, [weight.t(), 3, torch.zeros(1)], persistent=[weight])
    assert [(each.name, each.places) for each in found] == [("linear", (2,))]


def test_tensor_of_an_earlier_stage_is_a_boundary(graph):
    sent = torch.zeros(4)
    (found,) = storages([node(graph, "relu")], [sent], boundary=[("block", sent)])
    assert (found.name, found.origin, found.boundary, found.held) == ("block", "block", True, "")


def test_what_else_holds_a_storage_is_said(graph):
    values = [torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.zeros(1)]
    region = node(graph, None, RUN, [], 0, None, 0)
    nodes = [node(graph, "sent"), node(graph, "read"), node(graph, "ticket", operator.getitem, region, 1),
             node(graph, "free"), node(graph, "part", operator.getitem, node(graph), 0)]  # fmt: skip
    found = storages(nodes, values, outputs=[values[0], values[1]], read=[values[1]])
    assert [each.held for each in found] == [
        "the stage sends it on, or returns it",
        "code that stays Python holds it for its backward",
        "code that stays Python holds it for its backward",
        "",
        "",
    ]


def test_tensors_that_regions_read_are_each_found_once(graph):
    a, b = graph.placeholder("a"), graph.placeholder("b")
    first = graph.call_function(RUN, ([b, a], 0, None, 0))
    other = graph.call_function(torch.relu, (a,))
    second = graph.call_function(RUN, ([a, other], 1, None, 0))
    assert python_reads([first, other, second]) == [b, a, other]
    assert python_reads([other]) == []
