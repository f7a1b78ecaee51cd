"""The automatic schedules of Zero Bubble are never worse than the ones by hand."""

import itertools

import pytest
from panpipe.core.costs.costs import StageCosts
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family
from panpipe.core.schedules.scored import score

TIMES = [(1.0, 1.0, 1.0), (1.0, 1.1, 0.9), (10.0, 12.0, 4.0), (1.0, 2.0, 3.0)]
ROUNDING = 1 + 1e-9


@pytest.mark.parametrize(("automatic", "by_hand"), [("zb-1p", "zb-h1"), ("zb-2p", "zb-h2")])
def test_automatic_schedule_is_never_slower_than_the_one_by_hand(automatic, by_hand):
    for devices, count, times, hop_s in itertools.product((2, 4, 5), (2, 6, 12), TIMES, (0.0, 0.3)):
        costs = [StageCosts(*times, saved_bytes=1)] * devices
        problem = ScheduleProblem(devices, count, costs=costs, hop_s=hop_s)
        found, known = (score(problem, find_family(name).build(problem)) for name in (automatic, by_hand))
        assert found.result.makespan <= known.result.makespan * ROUNDING
        assert found.result.stage_span <= known.result.stage_span * ROUNDING
        assert found.schedule.name == automatic
