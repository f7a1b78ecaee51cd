"""Why devices idle, by hand."""

from panpipe.core.cluster.cluster import Cluster, Device, Hub, fully_connected
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.costs import StageCosts, StageEdge
from panpipe.core.plan.plan import TiedWeight
from panpipe.simulators.bubbles import CAUSES
from panpipe.simulators.run import simulate

from ..support.plans import orders, plan_of


def test_idle_time_of_two_stages_by_cause():
    # Device 0: 0F0 0–1, B's gradient is sent at 5.5 and there at 7, 0B0 7–9, sum of the tied weight until 14, STEP.
    # Device 1: 1F0 2.5–3.5, 1B0 3.5–5.5, sum until 14, STEP until 15; device 0's STEP ends at 14.25.
    plan = plan_of(
        orders("0F0 0B0", "1F0 1B0"),
        (0, 1),
        costs=[StageCosts(1.0, 1.0, 1.0, optimizer_s=0.25), StageCosts(1.0, 1.0, 1.0, optimizer_s=1.0)],
        cluster=fully_connected(2, 10**6, 10.0, 0.5),
        tied=(TiedWeight("embedding", (0, 1), 20),),
    )
    first, second = simulate(plan).bubbles
    assert list(first) == list(CAUSES)
    assert first == {
        "warm-up": 0.0,
        "dependency": 4.5,
        "communication": 1.5,
        "host copy": 0.0,
        "reduction": 5.0,
        "optimizer": 0.0,
        "cool-down": 0.75,
    }
    assert second == {
        "warm-up": 2.5,
        "dependency": 0.0,
        "communication": 0.0,
        "host copy": 0.0,
        "reduction": 8.5,
        "optimizer": 0.0,
        "cool-down": 0.0,
    }


def test_delays_by_a_full_link_are_communication_and_listed_by_link():
    # Devices 0 and 1 each send 20 bytes to device 2 at 1: 5 bytes/s each through its port until 5. Alone, 2 s.
    names = ("a", "b", "c")
    links = tuple(Link(name, "hub", 10.0, 0.5) for name in names)
    plan = plan_of(
        orders("0F0 0B0", "1F0 1B0", "2F0 2B0"),
        (0, 1, 2),
        cluster=Cluster(tuple(Device(name, 10**6) for name in names), (Hub("hub"),), links),
        edges=(StageEdge(0, 2, 20, 0), StageEdge(1, 2, 20, 0)),
    )
    result = simulate(plan)
    assert result.bubbles[2] == {
        "warm-up": 6.0,
        "dependency": 0.0,
        "communication": 0.0,
        "host copy": 0.0,
        "reduction": 0.0,
        "optimizer": 0.0,
        "cool-down": 0.0,
    }
    # The same after an operation of its own: the wait is no warm-up any more.
    plan = plan_of(
        orders("0F0 0B0", "1F0 1B0", "3F0 2F0 2B0 3B0"),
        (0, 1, 2, 2),
        cluster=plan.prediction.cluster,
        edges=(StageEdge(0, 2, 20, 0), StageEdge(1, 2, 20, 0)),
    )
    result = simulate(plan)
    assert result.bubbles[2]["communication"] == 5.0
    assert [(use.src, use.dst, use.delay_s) for use in result.links] == [
        ("a", "hub", 0.0),
        ("b", "hub", 0.0),
        ("hub", "c", 4.0),
    ]
