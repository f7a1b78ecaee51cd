"""What comes closest where nothing fits: what devices lack, what the worst holds, and the error as data."""

import pytest
from attrs import evolve
from panpipe.core.costs.costs import StageCosts
from panpipe.core.search.suggestions.infeasible import NothingFits, excess, holding
from panpipe.simulators.run import simulate

from ....support.plans import scheduled

COST = StageCosts(1.0, 1.0, 1.0, parameter_bytes=40, gradient_bytes=40, saved_bytes=100, workspace_bytes=7)


def plan_of(**peaks):
    plan = scheduled("1f1b", 2, 4, costs=[COST] * 2)
    return evolve(plan, prediction=evolve(plan.prediction, **{"peak_memory_bytes": (287, 187)} | peaks))


def test_excess_is_what_each_device_lacks():
    assert excess(plan_of(), (250, 100)) == (37, 87)
    assert excess(plan_of(), (287, 500)) == (0, 0)


@pytest.mark.parametrize(
    ("limits", "device", "action", "saved"), [((250, 100), 1, "1F0", 100), ((200, 187), 0, "0F1", 200)]
)
def test_device_that_lacks_most_is_described_at_its_peak_without_messages(limits, device, action, saved):
    held = holding(plan_of(), limits, simulate(plan_of()).timelines)
    assert (held.device, str(held.action), held.limit) == (device, action, limits[device])
    assert held.kinds == {"parameters": 40, "gradients": 40, "optimizer": 0, "saved": saved, "workspace": 7}
    assert held.bytes == 87 + saved


def test_error_is_made_again_from_its_details():
    error = NothingFits("device 0 needs more", plan_of(), (250, 100))
    again = NothingFits.with_details(str(error), error.details())
    assert (str(again), again.closest, again.limits) == ("device 0 needs more", error.closest, (250.0, 100.0))
    assert again.exit_status == 3
