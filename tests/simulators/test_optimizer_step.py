"""What an optimizer step waits for, by hand."""

import pytest
from attrs import evolve
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.costs import StageCosts
from panpipe.core.plan.plan import TiedWeight
from panpipe.simulators.run import simulate

from ..support.plans import orders, plan_of

HOP_S, STEP_S = 0.5, 0.25
COST = StageCosts(1.0, 1.0, 1.0, optimizer_s=STEP_S)
# Device 2: F 3–4, B 4–6. Device 1: F 1.5–2.5, B 6.5–8.5. Device 0: F 0–1, B 9–11.
PLAN = plan_of(
    orders("0F0 0B0", "1F0 1B0", "2F0 2B0"),
    (0, 1, 2),
    costs=[COST] * 3,
    cluster=fully_connected(3, 10**6, float("inf"), HOP_S),
)


SYNCED = evolve(PLAN, sync=True)


def step_starts(plan) -> tuple[float, ...]:
    return tuple(starts[-1] for starts, _ in simulate(plan).operation_times)


def test_a_barrier_ends_with_the_slowest_and_an_all_reduce():
    assert step_starts(SYNCED) == (12.0,) * 3
    result = simulate(SYNCED)
    assert [bubbles["optimizer"] for bubbles in result.bubbles] == [1.0, 3.5, 6.0]
    assert result.step_s == result.stage_span_s == 12.25


def test_a_tied_weight_is_summed_first():
    result = simulate(evolve(SYNCED, tied=(TiedWeight("embedding", (0, 2), 20),)))
    # To device 0 and back, the sum ends at 12 on devices 0 and 2, the barrier a second later on all.
    assert result.step_s == 13.25
    assert result.bubbles[2]["reduction"] == 6.0
    assert result.bubbles[2]["optimizer"] == 1.0
    for bubbles, busy in zip(result.bubbles, result.busy_s, strict=True):
        assert sum(bubbles.values()) + busy + STEP_S == pytest.approx(result.step_s)
