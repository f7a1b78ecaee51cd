"""Links, nodes and groups of the catalogue: numbers within their ranges, and parameters of the right type."""

import pytest
from attrs import evolve
from panpipe.core.cluster.catalog.parts import Group, LinkType, NodeType
from panpipe.core.cluster.sourced import Source
from panpipe.core.errors import RequestError

NUMBERS = (
    "peak_bytes_per_s", "effective_bytes_per_s", "effective_back_bytes_per_s", "effective_both_bytes_per_s",
    "latency_s",
    "gpus", "gpus_per_pcie_switch", "sockets", "nics", "oversubscription", "spine_latency_s", "host_memory_bytes",
    "host_memory_bytes_per_s",
)  # fmt: skip
SOURCES = dict.fromkeys(NUMBERS, Source("measured"))
LINK = LinkType("cable", "A cable", 100.0, 80.0, 1e-6, SOURCES)
NODE = NodeType("box", "A box", "none", 8, 2, 2, "between", 4, "nic", True, 1.0, 1e-6, SOURCES)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"peak_bytes_per_s": 0.0}, "peak_bytes_per_s of link 'cable' is 0.0: it must be a finite number above 0"),
        ({"latency_s": -1e-6}, "latency_s of link 'cable' is -1e-06: it must be a finite number at least 0"),
        ({"latency_s": float("inf")}, "latency_s of link 'cable' is inf"),
        ({"effective_bytes_per_s": 100.5}, "effective_bytes_per_s of link 'cable' is 100.5, above its peak of 100"),
        ({"effective_back_bytes_per_s": 101.0}, "effective_back_bytes_per_s of link 'cable' is 101, above its peak"),
        ({"effective_both_bytes_per_s": 201.0}, "effective_both_bytes_per_s of link 'cable' is 201, above its peak"),
        ({"effective_both_bytes_per_s": 0.0}, "it must be a finite number above 0"),
    ],
)  # fmt: skip
def test_link_with_a_wrong_number_is_refused(change, said):
    with pytest.raises(RequestError, match=said):
        evolve(LINK, **change)


def test_link_may_reach_its_peak_in_each_direction_and_both():
    evolve(
        LINK, effective_bytes_per_s=100.0, effective_back_bytes_per_s=100.0, effective_both_bytes_per_s=200.0,
        latency_s=0.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gpus": 0}, "gpus of node 'box' is 0"),
        ({"gpus": 4097}, "gpus of node 'box'"),
        ({"sockets": 65}, "sockets of node 'box'"),
        ({"oversubscription": 0.0}, "oversubscription of node 'box' is 0.0: it must be a finite number above 0"),
        ({"spine_latency_s": -1.0}, "spine_latency_s of node 'box' is -1.0"),
        ({"host_memory_bytes": 0}, "host_memory_bytes of node 'box' is 0"),
        ({"interconnect": "rings"}, "interconnect of node 'box' is 'rings': give one of nvswitch, mesh, bridges, none"),
    ],
)
def test_node_with_a_wrong_number_is_refused(change, said):
    with pytest.raises(RequestError, match=said):
        evolve(NODE, **change)


def test_node_with_the_largest_counts_is_accepted():
    evolve(NODE, gpus=4096, gpus_per_pcie_switch=4096, sockets=64, nics=4096, spine_latency_s=0.0)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"colour": 3}, "'colour' of nodes of 'box' is no parameter: give one of nics, nic"),
        ({"nics": 2.5}, "nics of nodes of 'box' is 2.5: give a whole number"),
        ({"nics": True}, "nics of nodes of 'box' is True: give a whole number"),
        ({"rails": 1}, "rails of nodes of 'box' is 1: give true or false"),
        ({"nic": 4}, "nic of nodes of 'box' is 4: give a name"),
        ({"oversubscription": "2"}, "oversubscription of nodes of 'box' is '2': give a number"),
    ],
)
def test_parameter_of_another_type_is_refused(parameters, said):
    with pytest.raises(RequestError, match=said):
        Group("box", 8, parameters=parameters)


def test_parameters_of_the_right_types_are_accepted():
    Group("box", 8, parameters={"nics": 2, "nic": "nic-100g", "rails": False, "oversubscription": 2})


def test_number_without_a_source_is_refused():
    with pytest.raises(RequestError, match="latency_s of link 'cable' has no source: say where 1e-06 comes from"):
        evolve(LINK, sources={name: source for name, source in SOURCES.items() if name != "latency_s"})


@pytest.mark.parametrize(("nodes", "gpus", "name"), [(0, 8, "nodes"), (1, 0, "gpus"), (-1, 8, "nodes")])
def test_group_has_at_least_one_node_and_device(nodes, gpus, name):
    with pytest.raises(RequestError, match=f"{name} of {nodes}x{gpus}xbox is .*: it must be at least 1"):
        Group("box", gpus, nodes)
