"""Why devices idle, by hand."""

from panpipe.core.cluster import fully_connected
from panpipe.core.costs import StageCosts
from panpipe.core.plan import TiedWeight
from panpipe.simulators.bubbles import CAUSES
from panpipe.simulators.run import simulate

from ..support.plans import orders, plan_of


def test_every_cause_of_two_stages():
    # Device 0: 0F0 0–1, B's gradient is sent at 5.5 and there at 7, 0B0 7–9, sum of the tied weight until 11.5, STEP.
    # Device 1: 1F0 2.5–3.5, 1B0 3.5–5.5, sum until 11.5, STEP until 12.5; device 0's STEP ends at 11.75.
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
        "reduction": 2.5,
        "optimizer": 0.0,
        "cool-down": 0.75,
    }
    assert second == {
        "warm-up": 2.5,
        "dependency": 0.0,
        "communication": 0.0,
        "reduction": 6.0,
        "optimizer": 0.0,
        "cool-down": 0.0,
    }
