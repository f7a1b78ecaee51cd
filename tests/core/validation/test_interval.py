"""Intervals from the errors of earlier predictions."""

import pytest
from attrs import evolve
from panpipe.core.policies.sharding import PARAMETERS
from panpipe.core.validation.interval import (
    OTHER,
    PUBLISHED_ERRORS,
    SHARDED,
    TENSOR,
    interval_of,
    interval_text,
    with_step_error,
)

from ..plan.test_plan import PLAN


def test_interval_holds_every_step_whose_prediction_errs_by_at_most_the_error():
    plan = with_step_error(PLAN, 0.3)
    low, high = plan.prediction.interval_s
    step_s = plan.prediction.step_s
    assert step_s / low - 1 == pytest.approx(0.3)
    assert step_s / high - 1 == pytest.approx(-0.3)
    assert interval_text(plan.prediction) == " ± 33 %"


def test_interval_is_as_wide_as_the_published_runs_of_its_kind():
    sharded = evolve(PLAN, shard=(PARAMETERS,) * len(PLAN.stages), mesh=evolve(PLAN.mesh, data=2))
    tensor = evolve(PLAN, mesh=evolve(PLAN.mesh, tensor=2))
    for plan, kind in ((sharded, SHARDED), (tensor, TENSOR), (PLAN, OTHER)):
        low, _ = with_step_error(plan, 0.0).predicted.interval_s
        assert plan.predicted.step_s / low - 1 == pytest.approx(PUBLISHED_ERRORS[kind])


def test_interval_moves_with_the_step():
    prediction = with_step_error(PLAN, 0.2).prediction
    low, high = interval_of(prediction, 3 * prediction.step_s)
    assert (low, high) == pytest.approx([3 * bound for bound in prediction.interval_s])


def test_plan_without_a_known_error_has_no_interval():
    assert with_step_error(PLAN, None) is PLAN
    assert with_step_error(evolve(PLAN, prediction=None), 0.1).prediction is None
    assert interval_of(PLAN.prediction, 1.0) is None
    assert interval_text(PLAN.prediction) == interval_text(None) == ""
