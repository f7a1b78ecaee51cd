"""Use of links, by hand."""

from panpipe.core.cluster.cluster import Cluster, Device
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.costs import StageCosts, StageEdge
from panpipe.core.trace.trace import LinkTrack
from panpipe.simulators.links import LinkUse
from panpipe.simulators.run import simulate

from ..support.plans import orders, plan_of


def test_link_usage_lists_each_direction_on_the_path():
    # F at 0–1, 20 bytes at 10 bytes/s (the slower link) until 3, F 3–4, B 4–6, 5 bytes back until 6.5, B until 8.5.
    devices = (Device("a", 9), Device("b", 9))
    cluster = Cluster(devices, ("hub",), (Link("a", "hub", 10.0, 0.0), Link("hub", "b", 40.0, 0.0)))
    edges = [StageEdge(0, 1, 20, 5)]
    result = simulate(plan_of(orders("0F0 0B0", "1F0 1B0"), (0, 1), cluster=cluster, edges=edges))
    assert result.step_s == 8.5
    assert result.links == (
        LinkUse("a", "hub", 20.0, 10.0, 20 / 85),
        LinkUse("hub", "a", 5.0, 10.0, 5 / 85),
        LinkUse("hub", "b", 20.0, 40.0, 20 / 340),
        LinkUse("b", "hub", 5.0, 40.0, 5 / 340),
    )


def test_link_usage_has_the_rate_over_time():
    # Devices 0 and 1 send 20 and 10 bytes to device 2 at 1 and 2: 10 bytes/s, then 5 each until 4 (all of the second),
    # and nothing is left of the first.
    names = ("a", "b", "c")
    links = tuple(Link(name, "hub", 10.0, 0.5) for name in names)
    plan = plan_of(
        orders("0F0 0B0", "1F0 1B0", "2F0 2B0"),
        (0, 1, 2),
        costs=[StageCosts(1.0, 1.0, 1.0), StageCosts(2.0, 1.0, 1.0), StageCosts(1.0, 1.0, 1.0)],
        cluster=Cluster(tuple(Device(name, 10**6) for name in names), ("hub",), links),
        edges=(StageEdge(0, 2, 25, 0), StageEdge(1, 2, 10, 0)),
    )
    assert simulate(plan).trace.links == (
        LinkTrack("a", "hub", 10.0, (1.0, 2.0, 4.0, 4.5), (10.0, 5.0, 10.0, 0.0)),
        LinkTrack("b", "hub", 10.0, (2.0, 4.0), (5.0, 0.0)),
        LinkTrack("hub", "c", 10.0, (1.0, 4.5), (10.0, 0.0)),
    )


def test_a_link_without_a_limit_has_no_rate():
    plan = plan_of(orders("0F0 0B0", "1F0 1B0"), (0, 1))
    result = simulate(plan)
    assert [use.bytes for use in result.links] == [10, 10]
    assert result.link_rates == ()


def test_links_that_are_not_shared_give_every_flow_their_full_rate():
    names = ("a", "b", "c")
    links = tuple(Link(name, "hub", 10.0, 0.0) for name in names)
    plan = plan_of(
        orders("0F0 0B0", "1F0 1B0", "2F0 2B0"),
        (0, 1, 2),
        cluster=Cluster(tuple(Device(name, 10**6) for name in names), ("hub",), links),
        edges=(StageEdge(0, 2, 20, 0), StageEdge(1, 2, 20, 0)),
    )
    assert simulate(plan).transfer_times[0, 2] == ([1.0], [5.0])
    assert simulate(plan, sharing=False).transfer_times[0, 2] == ([1.0], [3.0])
