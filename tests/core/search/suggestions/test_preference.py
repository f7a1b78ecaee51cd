"""Which plans are preferred if their times are equal, and which are measured against each other."""

from attrs import evolve
from panpipe.core.costs.costs import StageCosts
from panpipe.core.search.suggestions.preference import preference, preferred, worth_rehearsing

from ....support.plans import orders, plan_of

ORDER = preference(["gpipe", "1f1b", "zb-h1"])


def made(schedule, step_s, memory, stages=2):
    placement = tuple(stage % 2 for stage in range(stages))
    own = [" ".join(f"{s}F0" for s in range(d, stages, 2)) for d in range(2)]
    plan = plan_of(orders(*own), placement, costs=[StageCosts(1, 1, 1)] * stages)
    prediction = evolve(plan.prediction, step_s=step_s, peak_memory_bytes=(memory, memory / 2))
    return evolve(plan, schedule=schedule, prediction=prediction)


def test_preference_is_less_memory_then_fewer_stages_then_the_simpler_schedule():
    plans = [
        made("v-min", 1.0, 50, 4), made("1f1b", 1.0, 100), made("1f1b", 1.0, 101, 4), made("zb-h1", 1.0, 99),
        made("auto(1f1b)", 1.0, 100), made("gpipe", 1.0, 400),
    ]  # fmt: skip
    found = [(plan.schedule, len(plan.stages)) for plan in sorted(plans, key=ORDER)]
    assert found == [("v-min", 4), ("1f1b", 2), ("zb-h1", 2), ("auto(1f1b)", 2), ("1f1b", 4), ("gpipe", 2)]


def test_plan_about_as_fast_as_the_fastest_is_preferred_for_its_memory():
    plans = [made("gpipe", 1.0, 400), made("zb-h1", 1.04, 200), made("1f1b", 1.1, 100)]
    assert preferred(plans, ORDER).schedule == "zb-h1"


def test_plain_plan_and_the_fastest_preferred_plans_are_rehearsed():
    plain = made("1f1b", 1.2, 100)
    plans = [made("zb-h1", 1.1, 150), made("gpipe", 1.08, 400), made("v-half", 1.0, 300, 4), made("gis", 1.0, 500, 4)]
    found = worth_rehearsing([plain, *plans], [plain], ORDER, 3)
    assert [plan.schedule for plan in found] == ["1f1b", "zb-h1", "v-half"]
    assert [plan.schedule for plan in worth_rehearsing([plain, *plans], [plain], ORDER, 2)] == ["1f1b", "v-half"]


def test_plan_with_more_memory_and_no_gain_is_not_rehearsed():
    plain = made("1f1b", 1.0, 100)
    plans = [plain, made("zb-h1", 0.99, 150), made("v-half", 0.985, 300, 4)]
    assert worth_rehearsing(plans, [plain], ORDER, 3) == [plain]


def test_without_a_plain_plan_the_preferred_ones_are_rehearsed():
    plans = [made("zb-h1", 1.0, 100), made("gpipe", 1.01, 90), made("v-half", 1.2, 80, 4)]
    assert [plan.schedule for plan in worth_rehearsing(plans, [], ORDER, 2)] == ["gpipe"]
