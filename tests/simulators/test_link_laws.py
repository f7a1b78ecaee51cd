"""Laws of links, on clusters where much is shared, with replicas, tied weights and every kind of message."""

from itertools import pairwise

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.cluster.cluster import Cluster, Device, Hub, fully_connected
from panpipe.core.cluster.mesh import Mesh
from panpipe.core.cluster.routing import Link
from panpipe.core.plan.plan import Plan
from panpipe.core.trace.perfetto import trace_json
from panpipe.simulators.run import simulate

from ..support.plans import plans


def on_a_switch(count, rate):
    """A port each."""
    return [Hub("switch")], [Link(f"d{i}", "switch", rate, 0.25) for i in range(count)]


def in_nodes(count, rate):
    """Nodes of two with a NIC each, of half the rate, on one network."""
    ranks = range(count)
    nodes = sorted({i // 2 for i in ranks})
    links = [Link(f"d{i}", f"node{i // 2}", rate, 0.25) for i in ranks]
    links += [Link(f"node{node}", f"nic{node}", rate / 2, 0.5) for node in nodes]
    links += [Link(f"nic{node}", "network", rate / 2, 0.0) for node in nodes]
    hubs = [Hub(f"node{node}") for node in nodes] + [Hub(f"nic{node}", "nic") for node in nodes]
    return [*hubs, Hub("network")], links


def staged(count, rate):
    """Pairs behind PCIe switches of one host, whose slow memory they share; bridges over every other pair."""
    pairs = sorted({i // 2 for i in range(count)})
    links = [Link(f"d{i}", f"pcie{i // 2}", rate, 0.25) for i in range(count)]
    links += [Link(f"pcie{pair}", "host", rate, 0.25) for pair in pairs]
    links += [Link(f"d{2 * pair}", f"d{2 * pair + 1}", 2 * rate, 0.25) for pair in pairs[::2] if 2 * pair + 1 < count]
    return [*(Hub(f"pcie{pair}", "pcie") for pair in pairs), Hub("host", "host", None, 1.5 * rate)], links


@st.composite
def crowded(draw: st.DrawFn) -> Plan:
    """Plans with up to three replicas, anywhere on a cluster in which devices share links."""
    plan = draw(plans())
    data = draw(st.integers(1, 3))
    count = plan.devices * data + draw(st.integers(0, 1))
    hubs, links = draw(st.sampled_from([on_a_switch, in_nodes, staged]))(count, draw(st.sampled_from([4.0, 32.0])))
    devices = draw(st.one_of(st.none(), st.permutations(range(count))))
    places = (
        None
        if devices is None
        else tuple(tuple(devices[replica * plan.devices : (replica + 1) * plan.devices]) for replica in range(data))
    )
    cluster = Cluster(tuple(Device(f"d{i}", 10**9) for i in range(count)), tuple(hubs), tuple(links))
    prediction = evolve(plan.prediction, cluster=cluster)
    return evolve(plan, mesh=Mesh(plan.devices, data, places), prediction=prediction)


@settings(max_examples=50)
@given(crowded(), st.booleans())
def test_bytes_are_conserved_on_every_link_and_none_is_above_its_rate(plan, eager):
    result = simulate(plan, eager=eager)
    rates = {(rate.src, rate.dst): rate for rate in result.link_rates}
    for use in result.links:
        moved = 0.0
        if (use.src, use.dst) in rates:
            rate = rates[use.src, use.dst]
            assert all(0 <= each <= use.bytes_per_s * (1 + 1e-9) for each in rate.rates)
            assert rate.rates[-1] == 0.0
            moved = sum(
                each * (later - sooner) for each, (sooner, later) in zip(rate.rates, pairwise(rate.times), strict=False)
            )
        assert moved == pytest.approx(use.bytes, abs=1e-6)
    carried = {}
    for (src, dst), messages in result.queues.messages.items():
        for link, from_a in result.cluster.path(src, dst):
            ends = (link.a, link.b) if from_a else (link.b, link.a)
            carried[ends] = carried.get(ends, 0) + sum(message.bytes for message in messages)
    if plan.mesh.data == 1 and not plan.tied:
        assert {(use.src, use.dst): use.bytes for use in result.links} == carried
    else:
        assert all(use.bytes >= carried.get((use.src, use.dst), 0) - 1e-9 for use in result.links)


@settings(max_examples=50)
@given(crowded())
def test_delays_of_flows_are_the_delays_of_full_links(plan):
    result = simulate(plan)
    lost = 0.0
    for flow in result.flows:
        longer_s = flow.drained_s - flow.start_s - flow.alone_s
        assert longer_s >= -1e-9
        assert all(sooner.end_s == later.start_s for sooner, later in pairwise(flow.all_pieces))
        assert sum((p.end_s - p.start_s) * p.rate for p in flow.all_pieces) == pytest.approx(flow.bytes, abs=1e-6)
        lost += longer_s
    assert sum(use.delay_s for use in result.links) == pytest.approx(lost, abs=1e-6)
    assert all(min(bubbles.values()) >= -1e-9 for bubbles in result.bubbles)
    for (idle, busy), position in zip(
        zip(result.bubbles, result.busy_s, strict=True), list(range(plan.devices)) * plan.mesh.data, strict=True
    ):
        steps = sum(plan.prediction.costs[stage.index].optimizer_s for stage in plan.stages_on(position))
        assert sum(idle.values()) + busy + steps == pytest.approx(result.step_s)


@settings(max_examples=25)
@given(crowded())
def test_without_sharing_nothing_contends_and_every_flow_has_the_rate_of_its_way(plan):
    result = simulate(plan, sharing=False)
    assert all(flow.pieces is None or len(flow.pieces) <= 1 for flow in result.flows)
    assert all(use.delay_s == 0 for use in result.links)


def renamed(cluster, name):
    """Every device and hub under another name, so that their alphabetical order is turned round."""
    places = [device.name for device in cluster.devices] + [hub.name for hub in cluster.hubs]
    names = {place: f"{name}{len(places) - i:03d}" for i, place in enumerate(places)}
    return Cluster(
        tuple(evolve(device, name=names[device.name]) for device in cluster.devices),
        tuple(evolve(hub, name=names[hub.name]) for hub in cluster.hubs),
        tuple(evolve(link, a=names[link.a], b=names[link.b]) for link in cluster.links),
    )


@settings(max_examples=25)
@given(crowded(), st.booleans())
def test_the_order_of_what_is_simultaneous_does_not_depend_on_names(plan, eager):
    cluster = plan.prediction.cluster
    first, again, other = (
        simulate(plan, cluster=each, eager=eager) for each in (cluster, cluster, renamed(cluster, "z"))
    )
    assert trace_json(first.trace) == trace_json(again.trace)
    nameless, other_nameless = (evolve(result.trace, links=()) for result in (first, other))
    assert trace_json(nameless) == trace_json(other_nameless)
    assert [attempt.link_rates for attempt in (first,)] == [again.link_rates]
    assert [(rate.times, rate.rates) for rate in first.link_rates] == [
        (rate.times, rate.rates) for rate in other.link_rates
    ]


@settings(max_examples=25)
@given(plans(), st.integers(1, 3), st.booleans())
def test_more_bandwidth_never_slows_replicas_on_links_of_their_own(plan, data, eager):
    plan = evolve(plan, mesh=Mesh(plan.devices, data), tied=())

    def step_s(rate):
        cluster = fully_connected(plan.mesh.ranks, 10**9, rate, 0.5)
        return simulate(plan, cluster=cluster, eager=eager).step_s

    steps = [step_s(rate) for rate in (1.0, 4.0, 64.0, float("inf"))]
    assert all(later <= sooner + 1e-9 for sooner, later in pairwise(steps))
