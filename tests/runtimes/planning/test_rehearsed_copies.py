"""Rates of copies from rehearsed steps, and the cluster that has them."""

import pytest
from attrs import evolve
from panpipe.core.actions import Kind, parse_action
from panpipe.core.cluster.cluster import Hub, fully_connected
from panpipe.core.cluster.routing import Link
from panpipe.core.trace.trace import HOST_COPY_QUEUE, Trace, TraceEvent
from panpipe.runtimes.planning.rehearsed_copies import copy_rates, scaled, with_copy_rates

from ...support.plans import hosted, orders, plan_of, predicted

OUT, BACK = Kind.OFFLOAD, Kind.RELOAD


def step(*copies):
    """The trace of a step with these copies: device, action, seconds, bytes."""
    events = [
        TraceEvent(device, HOST_COPY_QUEUE, parse_action(action), 1.0, 1.0 + seconds, size)
        for device, action, seconds, size in copies
    ]
    return Trace("measured", "", 2, tuple(events), (), 1.0)


def on(cluster):
    plan = predicted(plan_of(orders("0F0 0B0", "1F0 1B0"), (0, 1)))
    return evolve(plan, prediction=evolve(plan.prediction, cluster=cluster))


def test_rate_is_that_of_all_bytes_of_a_step_in_a_direction():
    found = copy_rates([step((0, "0OFFLOAD0", 1.0, 100), (0, "0OFFLOAD1", 3.0, 100), (0, "0RELOAD0", 1.0, 100))], 0.5)
    assert found == {(0, OUT): 50.0, (0, BACK): 100.0}


def test_rate_is_a_quantile_over_steps_and_copies_of_nothing_do_not_count():
    steps = [step((1, "1RELOAD0", seconds, 100), (0, "0OFFLOAD0", 1.0, 0)) for seconds in (1.0, 2.0, 50.0)]
    assert copy_rates(steps, 0.5) == {(1, BACK): pytest.approx(50.0)}


@pytest.mark.parametrize("turned", [False, True])
def test_links_of_devices_to_their_host_have_the_rates_in_both_directions(turned):
    cluster = fully_connected(2, 10**9, 1e9, 0.0)
    ends = ("host", "device0") if turned else ("device0", "host")
    cluster = evolve(cluster, hubs=(Hub("host", "host"),), links=(*cluster.links, Link(*ends, 9.0, 0.0)))
    plan = with_copy_rates(on(cluster), {(0, OUT): 5.0, (0, BACK): 7.0})
    ((link, outward),) = plan.prediction.cluster.host_path(0)
    assert (link.rate(outward), link.rate(not outward)) == (5.0, 7.0)
    plan = with_copy_rates(on(cluster), scaled({(0, BACK): 7.0}, 2.0))
    ((link, outward),) = plan.prediction.cluster.host_path(0)
    assert (link.rate(outward), link.rate(not outward)) == (9.0, 3.5)


def test_other_links_and_those_that_devices_share_keep_their_rates():
    plan = on(hosted(fully_connected(2, 10**9, 1e9, 0.0), 9.0))
    assert with_copy_rates(plan, {}) == plan
    found = with_copy_rates(plan, {(0, OUT): 5.0, (0, BACK): 5.0}).prediction.cluster
    assert found.path(0, 1) == plan.prediction.cluster.path(0, 1)
    assert found.host_path(1) == plan.prediction.cluster.host_path(1)
    cluster = fully_connected(2, 10**9, 1e9, 0.0)
    links = [Link("device0", "switch", 9.0, 0.0), Link("device1", "switch", 9.0, 0.0), Link("switch", "host", 9.0, 0.0)]
    hubs = (Hub("switch", "pcie"), Hub("host", "host"))
    shared = on(evolve(cluster, hubs=hubs, links=(*cluster.links, *links)))
    assert with_copy_rates(shared, {(0, OUT): 5.0}).prediction.cluster == shared.prediction.cluster
