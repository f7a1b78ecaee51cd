"""Operators on any device: their stages, their orders, and what fits."""

import pytest
from panpipe.core.plan.validation.validate import validate
from panpipe.core.schedules.registry import find_family
from panpipe.core.search.annealing.free_placement import joined, refined
from panpipe.core.search.annealing.initial_walks import InitialWalks
from panpipe.core.search.annealing.moves import MoveShares
from panpipe.core.search.finalize import draft
from panpipe.core.search.problem.meter import Meter
from panpipe.core.search.problem.options import SearchSpace

from ....support.settings import setting_of

FAMILIES = tuple(map(find_family, ("1f1b", "zb-h1", "zb-v")))


def published(**options):
    setting = setting_of([3.0, 1.0, 1.0, 2.0, 2.0, 5.0, 1.0], backward=True, saved=10, **options)
    return list(InitialWalks([setting], SearchSpace(FAMILIES, chunks=(1, 2))).published())


@pytest.mark.parametrize("devices", [2, 3])
def test_operators_of_a_plan_are_no_slower_and_hold_no_more_than_its_stages(devices):
    for walk in published(devices=devices):
        walk.evaluate()
        fine = refined(walk)
        fine.evaluate()
        assert len(fine.best.placement) == 7
        assert 0 < fine.step_s <= walk.step_s
        assert all(own <= whole for own, whole in zip(fine.peaks, walk.peaks, strict=True))
        again = joined(fine)
        assert again.step_s <= fine.step_s * (1 + 1e-9)
        assert len(again.best.placement) < 7


def test_moves_of_stages_keep_orders_sound():
    walk = refined(published(devices=3)[0])
    walk.evaluate()
    before = walk.step_s
    walk.anneal(Meter(3000), 3000, 3, 0.05, MoveShares(0.0, place=0.3))
    assert walk.step_s < before
    plan, _ = draft(walk)
    validate(plan)
    assert sum(len(plan.stages_on(device)) for device in range(3)) == 7
