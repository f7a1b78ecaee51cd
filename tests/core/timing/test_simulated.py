"""The engine's times are the simulator's, to 1e-9: plain, contended, offloading and sharded plans."""

import random

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.cluster.cluster import Cluster, Device, Hub, fully_connected
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.policies.sharding import LEVELS
from panpipe.core.schedules.registry import find_family
from panpipe.core.search import longest_path
from panpipe.core.search.annealing.initial_walks import InitialWalks
from panpipe.core.search.finalize import draft
from panpipe.core.search.problem.setting import one_setting
from panpipe.core.search.search_options import SearchOptions
from panpipe.core.validation.validate import check_actions
from panpipe.simulators.run import alone_s, simulate

from ...support.plans import offloading_plans, plans, scheduled
from ...support.sharing import runs_of_all

FAMILIES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "1f1b-v")
QUICK, SLOW = 15, 150
"""Plans of each of the four kinds."""


def close(found, wanted):
    assert found == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def alone_is_simulated(plan):
    """Without shared links: all starts, ends and arrivals, as validation has them."""
    engine, result = check_actions(plan).engine, simulate(plan)
    for own, other in zip(engine.operations, result.operation_times, strict=True):
        close(own[0], other[0])
        close(own[1], other[1])
    for pair, arrivals in engine.arrivals.items():
        close(arrivals, result.transfer_times[pair][1])


def score_is_simulated(plan):
    """The planner's own score, where messages are pure delays: links of infinite rate, and receives posted at once."""
    plan = evolve(plan, tied=())  # the score counts no time for sums of tied weights
    known = plan.predicted
    score, result = longest_path(plan, known.costs, known.cluster), simulate(plan, eager=True)
    close(score.step_s, result.step_s)
    close(score.bubble_ratio, result.bubble_ratio)
    close(score.peak_saved_bytes, _of_positions(plan, result.peak_saved_bytes))
    close(score.peak_memory_bytes, _of_positions(plan, [float(each.working.max()) for each in result.timelines]))


def _of_positions(plan, peaks):
    return [max(peaks[device :: plan.devices]) for device in range(plan.devices)]


def on_own_links(plan, bytes_per_s, latency_s, between_bytes_per_s=8.0):
    """The plan on devices of which every two have a link of their own, and each has a host of its own at 16 bytes/s;
    the links between replicas have a rate of their own."""
    cluster = fully_connected(plan.mesh.ranks, 10**9, bytes_per_s, latency_s)
    replica = {device.name: number // plan.devices for number, device in enumerate(cluster.devices)}
    between = [link for link in cluster.links if replica[link.a] != replica[link.b]]
    slower = [evolve(link, bytes_per_s=between_bytes_per_s) for link in between]
    cluster = evolve(cluster, links=(*(link for link in cluster.links if link not in between), *slower))
    hosts = [Hub(f"host of {device.name}", "host") for device in cluster.devices]
    links = [Link(device.name, host.name, 16.0, 0.25) for device, host in zip(cluster.devices, hosts, strict=True)]
    cluster = evolve(cluster, hubs=tuple(hosts), links=(*cluster.links, *links))
    return evolve(plan, prediction=evolve(plan.prediction, cluster=cluster))


@st.composite
def sharded_plans(draw):
    """Two or three replicas that share any level, with random sizes of what they sum and gather."""
    name, data = draw(st.sampled_from(FAMILIES)), draw(st.integers(2, 3))
    chunks = 1 if name in ("gpipe", "1f1b", "zb-h1") else 2
    plan = scheduled(name, draw(st.integers(1, 3)), draw(st.integers(1, 5)), chunks, data=data)
    source = random.Random(draw(st.integers(0, 2**32)))
    levels = [source.choice(LEVELS) for _ in plan.stages]

    def cost():
        size = source.randrange(10, 200)
        seconds = [source.uniform(0.5, 2.0) for _ in range(4)]
        return evolve(
            plan.predicted.costs[0], forward_s=seconds[0], backward_input_s=seconds[1], backward_weight_s=seconds[2],
            optimizer_s=seconds[3], parameter_bytes=size, gradient_bytes=size, optimizer_bytes=2 * size,
        )  # fmt: skip

    costs = tuple(cost() for _ in levels)
    plan = evolve(plan, shard=tuple(levels), sync=source.random() < 0.3)
    return runs_of_all(evolve(plan, prediction=evolve(plan.prediction, costs=costs)), room=source.random() < 0.5)


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


CLUSTERS = (
    one_switch(4, 10.0, 0.02),
    one_switch(4, 10.0, 0.0, both=12.0),
    two_switches(4, 20.0, 8.0),
    one_host(4, 20.0, 25.0),
    fully_connected(3, 10**9, 6.0, 0.1),
)


def contended_is_simulated(seed):
    """A published schedule of a random graph on a cluster whose links are shared, as a search times it."""
    source = random.Random(seed)
    nodes = tuple(
        OpNode(f"n{i}", source.uniform(0.5, 2), source.uniform(0.5, 2), source.uniform(0, 2), 0.1, 0, 8, 4, 0)
        for i in range(10)
    )
    edges = [OpEdge(f"n{i}", f"n{i + 1}", source.randint(0, 20)) for i in range(9)]
    edges += [OpEdge("n0", "n9", 7), OpEdge("n1", "n8", 5)]
    cluster = source.choice(CLUSTERS)
    setting = one_setting(OpGraph(nodes, tuple(edges)), cluster, 5, [1e9] * len(cluster.devices), None)
    family = find_family(source.choice(FAMILIES))
    chunks = (1, 2) if family.chunks is None else (family.chunks[0],) * 2
    options = SearchOptions(families=(family,), min_chunks=chunks[0], max_chunks=chunks[1])
    walk = source.choice(list(InitialWalks([setting], options).published()))
    walk.evaluate()
    alone_s = walk.step_s
    walk.setting = evolve(setting, contended=True)
    walk.best.recompute[::2] = source.random() < 0.3
    walk.evaluate()
    plan, costs = draft(walk)
    close(walk.step_s, simulate(plan, costs, cluster).step_s)
    return walk.step_s > alone_s * 1.001


@settings(max_examples=QUICK, deadline=None)
@given(plans(), st.sampled_from([0.0, 0.5]))
def test_times_of_plain_plans_are_the_simulators(plan, latency_s):
    alone_is_simulated(on_own_links(plan, 8.0, latency_s))
    score_is_simulated(on_own_links(plan, float("inf"), latency_s))


@settings(max_examples=QUICK, deadline=None)
@given(offloading_plans(), st.sampled_from([0.0, 0.5]))
def test_times_of_offloading_plans_are_the_simulators(plan, latency_s):
    alone_is_simulated(on_own_links(plan, 8.0, latency_s))
    score_is_simulated(on_own_links(plan, float("inf"), latency_s))


@settings(max_examples=QUICK, deadline=None)
@given(sharded_plans(), st.sampled_from([0.0, 0.5]))
def test_times_of_sharded_plans_are_the_simulators(plan, latency_s):
    score_is_simulated(on_own_links(plan, float("inf"), latency_s))


@settings(max_examples=QUICK, deadline=None)
@given(st.one_of(plans(), offloading_plans(), sharded_plans()), st.booleans(), st.integers(0, 3))
def test_step_without_shared_links_is_the_simulators_on_any_cluster(plan, sync, number):
    clusters = one_switch(plan.mesh.ranks, 10.0, 0.02, both=12.0), one_host(plan.mesh.ranks, 20.0, 25.0)
    clusters += two_switches(plan.mesh.ranks, 20.0, 8.0), one_switch(plan.mesh.ranks, 30.0, 0.0)
    plan, cluster = evolve(plan, sync=sync), clusters[1 if plan.memory.offload else number]
    alone = simulate(plan, cluster=cluster, sharing=False)
    close(alone_s(plan, plan.predicted.costs, cluster), alone.step_s)
    if alone.without_update_s is not None:
        close(alone_s(plan, plan.predicted.costs, cluster, update=False), alone.without_update_s)


def test_times_of_contended_plans_are_the_simulators():
    assert sum(contended_is_simulated(seed) for seed in range(QUICK)) >= 3


@pytest.mark.slow
@settings(max_examples=SLOW, deadline=None)
@given(plans(), offloading_plans(), sharded_plans(), st.integers(QUICK, 2**32), st.sampled_from([0.0, 0.5]))
def test_times_of_six_hundred_plans_are_the_simulators(plain, offloading, sharded, seed, latency_s):
    for plan in (plain, offloading):
        alone_is_simulated(on_own_links(plan, 8.0, latency_s))
    for plan in (plain, offloading, sharded):
        score_is_simulated(on_own_links(plan, float("inf"), latency_s))
    contended_is_simulated(seed)
