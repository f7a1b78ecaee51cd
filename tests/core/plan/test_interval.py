"""Intervals from the errors of earlier predictions."""

import pytest
from attrs import evolve
from panpipe.core.plan.interval import interval_of, interval_text, with_step_error

from .test_plan import PLAN


def test_interval_holds_every_step_whose_prediction_errs_by_at_most_the_error():
    plan = with_step_error(PLAN, 0.1)
    low, high = plan.prediction.interval_s
    step_s = plan.prediction.step_s
    assert step_s / low - 1 == pytest.approx(0.1)
    assert step_s / high - 1 == pytest.approx(-0.1)
    assert interval_text(plan.prediction) == " ± 10 %"


def test_interval_moves_with_the_step():
    prediction = with_step_error(PLAN, 0.2).prediction
    low, high = interval_of(prediction, 3 * prediction.step_s)
    assert (low, high) == pytest.approx([3 * bound for bound in prediction.interval_s])


def test_plan_without_a_known_error_has_no_interval():
    assert with_step_error(PLAN, None) is PLAN
    assert with_step_error(evolve(PLAN, prediction=None), 0.1).prediction is None
    assert interval_of(PLAN.prediction, 1.0) is None
    assert interval_text(PLAN.prediction) == interval_text(None) == ""
