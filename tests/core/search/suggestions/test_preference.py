"""Which plans are preferred if their times are equal, and which are measured against each other."""

from attrs import evolve
from panpipe.core.costs.costs import StageCosts
from panpipe.core.plan.plan import TiedWeight
from panpipe.core.search.suggestions.preference import candidates, preference, preferred

from ....support.plans import orders, plan_of

ORDER = preference(["gpipe", "1f1b", "zb-h1"])


def cut(plan):
    return tuple(stage.nodes for stage in plan.stages)


def made(schedule, step_s, memory, stages=2, placement=None):
    placement = placement or tuple(stage % 2 for stage in range(stages))
    own = [" ".join(f"{s}F0" for s, where in enumerate(placement) if where == d) for d in range(2)]
    own[0] += " 0F0" * (sum(map(ord, schedule)) % 89)  # other schedules have other actions
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


def names(plans):
    return [(plan.schedule, len(plan.stages)) for plan in plans]


def test_candidates_are_the_plain_plan_the_fastest_for_each_placement_and_the_smallest():
    plain = made("1f1b", 1.15, 100)
    others = [made("zb-h1", 1.1, 150), made("gpipe", 1.08, 400), made("zb-v", 1.0, 300, 4), made("gis", 1.04, 90, 4)]
    found = candidates([plain, *others], ORDER, (), plain=[plain])
    assert names(found) == [("gis", 4), ("1f1b", 2), ("zb-v", 4), ("gpipe", 2)]


def test_fastest_plan_of_another_placement_comes_before_the_smallest():
    plain, folded = made("1f1b", 1.15, 100), made("v-half", 1.07, 310, 4, (0, 1, 1, 0))
    others = [made("gpipe", 1.08, 400), made("zb-v", 1.0, 300, 4), folded, made("gis", 1.06, 90, 4)]
    found = candidates([plain, *others], ORDER, (), plain=[plain])
    assert names(found) == [("zb-v", 4), ("1f1b", 2), ("v-half", 4), ("gpipe", 2)]


def test_first_candidate_has_a_regular_cut():
    plain, fast = made("1f1b", 1.15, 100), made("v-half", 1.0, 300, 4)
    assert names(candidates([plain, fast], ORDER, {cut(plain)}, plain=[plain])) == [("1f1b", 2), ("v-half", 4)]


def test_plan_that_is_predicted_to_be_much_slower_is_no_candidate_unless_it_is_the_plain_one():
    plain = made("1f1b", 2.0, 100)
    assert names(candidates([made("zb-h1", 1.0, 150), made("v-half", 1.3, 50, 4)], ORDER, ())) == [("zb-h1", 2)]
    assert names(candidates([made("zb-h1", 1.0, 150)], ORDER, (), plain=[plain])) == [("zb-h1", 2), ("1f1b", 2)]


def test_candidates_of_replicas_that_share_have_the_same_cut():
    plain = evolve(made("1f1b", 1.0, 100), shard=("gradients",) * 2)
    others = [
        evolve(made("zb-h1", 0.9, 300), shard=plain.shard),
        evolve(made("v-half", 1.0, 300, 4), shard=plain.shard * 2),
    ]
    assert names(candidates([plain, *others], ORDER, {cut(plain)}, plain=[plain])) == [("zb-h1", 2), ("1f1b", 2)]


def test_candidates_sum_the_gradients_of_tied_weights_alike():
    plain = made("1f1b", 1.0, 100)
    tied = evolve(made("v-half", 1.0, 300, 4), tied=(TiedWeight("w", (0, 3), 8),))
    assert candidates([plain, tied], ORDER, {cut(plain)}, plain=[plain]) == [plain]
