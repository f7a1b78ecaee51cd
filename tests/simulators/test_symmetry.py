"""Symmetric replicas: the result of one of them is that of a simulation of all, in every field."""

from unittest.mock import patch

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.cluster.cluster import Cluster, Device, Hub, fully_connected
from panpipe.core.cluster.mesh import Mesh
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.costs import StageCosts
from panpipe.core.lowering.lowering import lower
from panpipe.core.lowering.queues import queues_of
from panpipe.simulators.run import simulate
from panpipe.simulators.symmetry import find_symmetry

from ..support.plans import plans, scheduled


def nodes(devices, data, *, one_nic=False, slower=False):
    """A node for each replica, with a switch for its messages; gradients go over a NIC of each device, or of a node."""
    own = [Device(f"gpu{number}", 10**9) for number in range(devices * data)]
    links, hubs = [], [Hub("network")]
    for number, device in enumerate(own):
        node, place = divmod(number, devices)
        links.append(Link(device.name, f"switch{node}", 5.0 if slower and node else 6.0, 0.25))
        nic = f"nic{node}" if one_nic else f"nic{node}.{place}"
        links.append(Link(device.name, nic, 3.0, 0.5))
    hubs += [Hub(f"switch{node}") for node in range(data)]
    nics = sorted({link.b for link in links if link.b.startswith("nic")})
    hubs += [Hub(nic, "nic") for nic in nics]
    return Cluster(tuple(own), tuple(hubs), (*links, *(Link(nic, "network", 3.0, 0.5) for nic in nics)))


def replicated(plan, data, cluster, sync=False):
    plan = evolve(plan, mesh=Mesh(plan.devices, data), tied=(), sync=sync)
    return evolve(plan, prediction=evolve(plan.prediction, cluster=cluster))


def symmetry_of(plan):
    one, known = queues_of(plan, lower(plan)), plan.predicted
    return find_symmetry(plan, known.costs, known.cluster, one, one.replicated(plan.mesh.data))


def together(plan, **options):
    with patch("panpipe.simulators.run.find_symmetry", return_value=None):
        return simulate(plan, **options)


@settings(max_examples=80)
@given(plans(), st.integers(2, 3), st.sampled_from(["own", "nodes", "one nic"]), st.booleans(), st.booleans())
def test_result_of_symmetric_replicas_is_that_of_all(plan, data, links, sync, eager):
    own = fully_connected(plan.devices * data, 10**9, 4.0, 0.5)
    cluster = own if links == "own" else nodes(plan.devices, data, one_nic=links == "one nic")
    plan = replicated(plan, data, cluster, sync)
    assert symmetry_of(plan) is not None
    found, full = simulate(plan, eager=eager), together(plan, eager=eager)
    assert found.operation_times == full.operation_times
    assert found.queue_times == full.queue_times
    assert (found.tasks, found.flows) == (full.tasks, full.flows)
    assert (found.bubbles, found.links) == (full.bubbles, full.links)
    assert found.trace == full.trace
    assert found.peak_memory_bytes == full.peak_memory_bytes


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster(
            tuple(Device(f"gpu{i}", 10**9) for i in range(4)),
            ("switch",),
            tuple(Link(f"gpu{i}", "switch", 6.0, 0.25) for i in range(4)),
        ),
        nodes(2, 2, slower=True),
    ],
    ids=["messages-and-sums-share-links", "one-replica-has-slower-links"],
)
def test_replicas_that_are_not_symmetric_are_simulated_together(cluster):
    costs = [StageCosts(1.0, 1.0, 1.0, gradient_bytes=40)] * 2
    plan = replicated(scheduled("1f1b", 2, 3, data=2, costs=costs), 2, cluster)
    assert symmetry_of(plan) is None
    found, full = simulate(plan), together(plan)
    assert found.operation_times == full.operation_times
