"""The compiled time of orders whose messages share links is the simulator's."""

import random

import numpy as np
import pytest
from attrs import evolve
from panpipe.core.cluster.cluster import Cluster, Device, Hub, fully_connected
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.schedules.registry import find_family
from panpipe.core.search.annealing.initial_walks import InitialWalks
from panpipe.core.search.finalize import draft
from panpipe.core.search.problem.options import SearchSpace
from panpipe.core.search.problem.setting import one_setting
from panpipe.simulators.run import simulate

FAMILIES = tuple(map(find_family, ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "1f1b-v")))


def one_switch(devices, bytes_per_s, latency_s, both=None):
    """Devices on one switch, over links that all of a device's messages share."""
    places = tuple(Device(f"gpu{i}", 10**9) for i in range(devices))
    links = tuple(Link(place.name, "switch", bytes_per_s, latency_s, both_bytes_per_s=both) for place in places)
    return Cluster(places, (Hub("switch"),), links)


def two_switches(devices, bytes_per_s, between):
    """Two halves, with one link between their switches."""
    places = tuple(Device(f"gpu{i}", 10**9) for i in range(devices))
    hubs = Hub("left"), Hub("right")
    links = [Link(p.name, hubs[2 * i >= devices].name, bytes_per_s, 0.01 * i) for i, p in enumerate(places)]
    return Cluster(places, hubs, (*links, Link("left", "right", between, 0.05)))


def one_host(devices, bytes_per_s, memory_bytes_per_s):
    """Devices on one host, through whose memory all messages are staged."""
    places = tuple(Device(f"gpu{i}", 10**9) for i in range(devices))
    links = tuple(Link(place.name, "host", bytes_per_s, 0.01) for place in places)
    return Cluster(places, (Hub("host", "host", None, memory_bytes_per_s),), links)


def graph_of(seed, operators):
    """A chain with skips; times and bytes are random."""
    draw = random.Random(seed)
    nodes = tuple(
        OpNode(f"n{i}", draw.uniform(0.5, 2), draw.uniform(0.5, 2), draw.uniform(0, 2), 0.1, 0, 8, 4, 0)
        for i in range(operators)
    )
    edges = [OpEdge(f"n{i}", f"n{i + 1}", draw.randint(0, 20)) for i in range(operators - 1)]
    edges += [OpEdge("n0", f"n{operators - 1}", 7), OpEdge("n1", f"n{operators - 2}", 5)]
    return OpGraph(nodes, tuple(edges))


CLUSTERS = {
    "one switch": one_switch(4, 10.0, 0.02),
    "duplex": one_switch(4, 10.0, 0.0, both=12.0),
    "two switches": two_switches(4, 20.0, 8.0),
    "host memory": one_host(4, 20.0, 25.0),
    "pairs": fully_connected(3, 10**9, 6.0, 0.1),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_contended_step_is_the_simulators(name):
    cluster = CLUSTERS[name]
    slower = 0
    for seed in range(3):
        count = len(cluster.devices)
        setting = one_setting(graph_of(seed, 10), cluster, 5, [1e9] * count, None)
        walks = list(InitialWalks([setting], SearchSpace(FAMILIES, chunks=(1, 2))).published())
        assert len(walks) >= 6
        for walk in walks:
            alone = evolve(walk, best=walk.best.copy())
            alone.evaluate()
            walk.setting = evolve(setting, contended=True)
            walk.best.recompute[::2] = seed == 2
            walk.evaluate()
            plan, costs = draft(walk)
            assert walk.step_s == pytest.approx(simulate(plan, costs, cluster, memory=False).step_s, rel=1e-9)
            slower += walk.step_s > alone.step_s * 1.001
    assert slower > 3


def test_deadlock_is_negative_with_contention_too():
    setting = evolve(one_setting(graph_of(0, 4), CLUSTERS["pairs"], 2, [1e9] * 3, None), contended=True)
    walk = next(InitialWalks([setting], SearchSpace(FAMILIES[:1], chunks=(1, 1))).published())
    last = len(walk.best.lengths) - 1
    walk.best.orders[last, : walk.best.lengths[last]] = walk.best.orders[last, : walk.best.lengths[last]][::-1].copy()
    walk.evaluate()
    assert walk.step_s < 0
    assert np.isfinite(walk.step_s)
