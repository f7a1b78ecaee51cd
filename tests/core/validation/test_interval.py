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


def test_interval_is_as_wide_as_the_published_runs_of_its_kind():
    sharded = evolve(PLAN, shard=(PARAMETERS,) * len(PLAN.stages), mesh=evolve(PLAN.mesh, data=2))
    tensor = evolve(PLAN, mesh=evolve(PLAN.mesh, tensor=2))
    for plan, kind in ((sharded, SHARDED), (tensor, TENSOR), (PLAN, OTHER)):
        low, _ = with_step_error(plan, 0.0).predicted.interval_s
        assert plan.predicted.step_s / low - 1 == pytest.approx(PUBLISHED_ERRORS[kind])


def test_plan_without_a_known_error_has_no_interval():
    assert with_step_error(PLAN, None) is PLAN
    assert with_step_error(evolve(PLAN, prediction=None), 0.1).prediction is None
    assert interval_of(PLAN.prediction, 1.0) is None
    assert interval_text(PLAN.prediction) == interval_text(None) == ""
