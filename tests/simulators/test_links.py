"""Use of links, by hand."""

from panpipe.core.cluster import Cluster, Device, Link
from panpipe.core.costs import StageEdge
from panpipe.simulators.links import LinkUse
from panpipe.simulators.run import simulate

from ..support.plans import orders, plan_of


def test_each_direction_of_each_link_on_the_way():
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
