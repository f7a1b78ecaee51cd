"""From walks to plans: devices' numbers, meshes, candidates by the oracle's score, and the refusal of the best."""

import pytest
from attrs import evolve
from panpipe.core.cluster.mesh import Mesh
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family
from panpipe.core.search.annealing.walk import start_walk
from panpipe.core.search.finalize import draft, predicted, refuse_above, rescored, score_walk
from panpipe.core.search.problem.oracle import Score, longest_path
from panpipe.core.search.suggestions.infeasible import NothingFits

from ...support.settings import setting_of


def walk_of(cuts=(0, 3, 6), replicas=None, **options):
    setting = setting_of([1.0] * 6, backward=True, saved=10, **options)
    if replicas is not None:
        setting = evolve(setting, replicas=replicas)
    schedule = find_family("1f1b").build(ScheduleProblem(2, 4))
    return start_walk(setting, schedule, cuts, split=False)


def test_plan_of_a_walk_has_its_stages_orders_and_costs():
    walk = walk_of((0, 2, 6))
    walk.best.recompute[1] = True
    plan, costs = draft(walk)
    assert [stage.nodes for stage in plan.stages] == [("n0", "n1"), ("n2", "n3", "n4", "n5")]
    assert (plan.schedule, plan.mesh, plan.memory.recompute, plan.prediction) == ("1f1b", Mesh(2), (1,), None)
    assert plan.device_actions == walk.orders()
    assert [cost.saved_bytes for cost in costs] == [20, 40]


def test_one_pipeline_has_the_clusters_numbers_of_its_devices():
    plan, _ = draft(walk_of(replicas=((1, 0),)))
    assert plan.placement == (1, 0)
    assert plan.mesh == Mesh(2)
    assert {action.stage for action in plan.device_actions[1]} == {0}


def test_replicas_are_positions_that_the_mesh_maps_to_devices():
    plan, _ = draft(walk_of(devices=4, replicas=((0, 2), (1, 3))))
    assert (plan.placement, plan.mesh) == ((0, 1), Mesh(2, 2, ((0, 2), (1, 3))))
    plan, _ = draft(walk_of(devices=4, replicas=((0, 1), (2, 3))))
    assert plan.mesh == Mesh(2, 2)


def fixed_score(*peaks, step_s=1.0):
    return lambda plan, costs, cluster: Score(step_s, peaks, (0.0,) * len(peaks), 0.25)


def test_candidates_rank_by_what_they_lack_and_then_by_time():
    fits, lacks = (score_walk(walk_of(memory=100.0), fixed_score(*peaks)) for peaks in ((50.0, 100.0), (120.0, 130.0)))
    assert (fits.rank, lacks.rank) == ((0.0, 1.0), (30.0, 1.0))
    assert fits.limits == (100.0, 100.0)
    refuse_above(fits, 7)
    plan = predicted(fits, 7)
    assert (plan.prediction.step_s, plan.prediction.peak_memory_bytes) == (1.0, (50.0, 100.0))
    assert (plan.prediction.evaluations, plan.prediction.bubble_ratio) == (7, 0.25)


def test_best_plan_that_does_not_fit_is_refused_with_the_device_that_lacks_most():
    best = score_walk(walk_of(memory=50.0), longest_path)
    with pytest.raises(NothingFits) as error:
        refuse_above(best, 7)
    # Device 0 holds two microbatches of 30 bytes, device 1 one.
    assert str(error.value).startswith("device 0 ('device0') needs 60 bytes and may hold 50: 0 of parameters")
    assert "60 of saved tensors (held by 1f1b, 4 microbatches), 0 of workspace" in str(error.value)
    assert str(error.value).endswith("this plan fits with 10 bytes more a device, 60 in all")
    assert error.value.limits == (50.0, 50.0)
    assert error.value.closest.prediction.evaluations == 7


@pytest.mark.parametrize(
    ("peaks", "count"), [([90.0] * 4, 2), ([200.0, 90.0, 90.0, 90.0], 2), ([200.0, 200.0, 90.0, 90.0], 3)]
)
def test_more_walks_are_scored_until_one_fits(peaks, count):
    left = iter(peaks)
    walks = [walk_of(memory=100.0) for _ in peaks]

    def oracle(plan, costs, cluster):
        return Score(1.0, (next(left), 0.0), (0.0, 0.0), 0.0)

    assert len(rescored(walks, oracle, 2)) == count
