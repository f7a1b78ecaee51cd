"""Scores of oracles."""

from attrs import evolve
from panpipe.core.costs.costs import StageCosts
from panpipe.core.search.problem.oracle import Score, by_position, with_costs

from ....support.plans import orders, plan_of


def test_score_by_position_is_the_maximum_over_replicas():
    score = Score(2.0, (1.0, 5.0, 3.0, 4.0), (6.0, 0.0, 2.0, 9.0), 0.5)
    assert by_position(score, 2) == Score(2.0, (3.0, 5.0), (6.0, 9.0), 0.5)
    assert by_position(score, 4) == score


def test_plan_with_other_costs_has_the_oracles_prediction_and_no_measurement_of_the_one_before():
    plan = plan_of(orders("0F0 0B0"), (0,))
    plan = evolve(plan, prediction=evolve(plan.prediction, interval_s=(1.0, 2.0)))
    costs, asked = (StageCosts(2.0, 1.0, 1.0),), []

    def oracle(given, of, cluster):
        asked.append((given.prediction, of, cluster))
        return Score(4.0, (11.0,), (7.0,), 0.25)

    found = with_costs(plan, costs, oracle).prediction
    assert asked == [(None, costs, plan.prediction.cluster)]
    assert (found.costs, found.step_s, found.peak_memory_bytes, found.peak_saved_bytes) == (costs, 4.0, (11.0,), (7.0,))
    assert (found.bubble_ratio, found.interval_s) == (0.25, None)
