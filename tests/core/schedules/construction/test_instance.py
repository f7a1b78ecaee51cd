"""Problems as arrays, literally, and coded orders there and back."""

import numpy as np
import pytest
from panpipe.core.costs.costs import StageCosts
from panpipe.core.schedules.construction.instance import ROUNDING, codes_of, instance
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family

COST = StageCosts(1.0, 2.0, 3.0, backward_s=4.0, saved_bytes=10, freed_by_input_bytes=4, created_by_input_bytes=7)


def task(limit=None, placement=(0, 1, 1, 0)):
    return instance(ScheduleProblem(2, 3, 2, (COST,) * 4, 0.5, limit), placement)


def test_arrays_have_times_sizes_and_a_hop_between_devices():
    found = task(25.0)
    assert found.stages_on.tolist() == [[0, 3], [1, 2]]
    assert found.times[:, 0].tolist() == [1, 2, 3]
    assert (found.backward[0], found.saved[0], found.kept[0], found.need[0]) == (4, 10, 13, 13)
    assert found.hops.tolist() == [0, 0.5, 0, 0.5]
    assert found.limits.tolist() == pytest.approx([25 * (1 + ROUNDING)] * 2)
    assert task().limits.tolist() == [np.inf] * 2


def test_least_memory_is_one_microbatch_on_all_stages_of_a_device_and_splitting_may_take_more():
    assert task().least_memory == 20
    assert task(25.0).too_large_to_split.tolist() == [True] * 4
    assert task(26.0).too_large_to_split.tolist() == [False] * 4


def test_fused_stages_run_whole_backwards_and_hold_no_more_than_they_saved():
    fused = np.array([True, False, False, True])
    found = task()
    assert found.fused_times(fused).tolist() == [[1] * 4, [4, 2, 2, 4], [0, 3, 3, 0]]
    assert found.fused_need(fused).tolist() == [10, 13, 13, 10]
    assert found.fused_kept(fused).tolist() == [10, 13, 13, 10]
    assert found.times[1].tolist() == [2] * 4  # its own stay


def test_arguments_for_orders_are_a_chain_of_stages():
    count, placement, costs, limits = task(25.0).for_orders()
    assert (count, placement.tolist(), limits.tolist()) == (3, [0, 1, 1, 0], task(25.0).limits.tolist())
    assert costs.times[3].tolist() == [4] * 4
    assert (costs.forward_first.tolist(), costs.forward_from.tolist()) == ([0, 0, 1, 2, 3], [0, 1, 2])
    assert (costs.back_first.tolist(), costs.back_from.tolist()) == ([0, 1, 2, 3, 3], [1, 2, 3])
    assert costs.forward_delay.tolist() == costs.back_delay.tolist() == [0.5, 0, 0.5]
    assert (costs.after_forward.tolist(), costs.after_input.tolist()) == ([10] * 4, [13] * 4)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("zb-v", 2)])
def test_schedules_are_coded_and_decoded(name, chunks):
    problem = ScheduleProblem(2, 3, chunks)
    schedule = find_family(name).build(problem)
    again = instance(problem, schedule.placement).schedule(schedule.name, *codes_of(schedule))
    assert again == schedule
