"""What the memory limit costs a plan."""

from attrs import evolve
from panpipe.core.schedules.registry import find_family
from panpipe.core.search import longest_path
from panpipe.core.search.suggestions.unlimited_memory import unlimited_step_s

from ....support.plans import UNIT, scheduled

FAMILIES = [find_family(name) for name in ("gpipe", "1f1b", "zb-h2", "zb-v")]


def limited(name, limit):
    """The step of a schedule for equal stages, and of the fastest that does not fit into ``limit``."""
    plan = scheduled(name, 4, 8)
    step_s = longest_path(plan, plan.prediction.costs, plan.prediction.cluster).step_s
    plan = evolve(plan, prediction=evolve(plan.prediction, step_s=step_s))
    return step_s, unlimited_step_s(plan, FAMILIES, [limit] * 4)


def test_unlimited_step_is_that_of_a_faster_schedule_that_does_not_fit():
    # 1F1B fills and drains for 3 (F + B); ZB-H2, which holds up to 7 microbatches, for 3 F.
    assert limited("1f1b", 4 * UNIT.saved_bytes + UNIT.workspace_bytes) == (33.0, 27.0)


def test_unlimited_step_is_none_if_the_faster_schedule_fits():
    assert limited("1f1b", 10**9) == (33.0, None)


def test_unlimited_step_is_none_if_no_schedule_is_faster():
    assert limited("zb-h2", 1.0) == (27.0, None)
