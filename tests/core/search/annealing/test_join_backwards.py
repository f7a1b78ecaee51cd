"""I and W that are joined into B."""

import numpy as np
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family
from panpipe.core.search.annealing.walk import start_walk

from ....support.settings import setting_of


def walk_of(split=True):
    schedule = find_family("1f1b").build(ScheduleProblem(2, 2))
    walk = start_walk(setting_of([1.0, 1.0], microbatches=2, backward=True), schedule, (0, 1, 2), split=split)
    walk.evaluate()
    return walk


def names(walk):
    return [" ".join(map(str, row)) for row in walk.orders()]


def test_i_directly_followed_by_w_is_joined_if_the_step_does_not_get_longer():
    walk = walk_of()
    assert names(walk) == ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1"]
    before = walk.step_s
    walk.join_backwards()
    # 1B0 ends at 4, so 0B0 ends at 6, when 1I1 does. After 1B1, 0B1 would start at 7 only.
    assert names(walk) == ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1I1 1W1"]
    assert walk.step_s == before


def test_i_and_w_with_other_actions_between_them_stay_split():
    walk = walk_of()
    row = walk.best.orders[0, : walk.best.lengths[0]].copy()
    walk.best.orders[0, :6] = row[[0, 1, 2, 4, 3, 5]]  # 0I0 0I1 0W0 0W1
    walk.evaluate()
    walk.join_backwards()
    assert names(walk)[0] == "0F0 0F1 0I0 0I1 0W0 0W1"
    assert np.isfinite(walk.step_s)
