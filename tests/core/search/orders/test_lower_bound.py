"""Lower bounds by hand: fill and work, drain, and memory."""

import pytest
from panpipe.core.costs.costs import StageCosts
from panpipe.core.schedules.construction.instance import instance
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.search.orders.auto import lower_bound


def bound(costs, microbatches, placement=None, hop=0.0, memory=None):
    devices = len(set(placement or range(len(costs))))
    problem = ScheduleProblem(devices, microbatches, len(costs) // devices, tuple(costs), hop, memory)
    return lower_bound(instance(problem, placement or range(devices)))


EQUAL = StageCosts(1.0, 1.0, 1.0, saved_bytes=1)


def test_one_microbatch_goes_there_and_back_with_every_hop():
    # F F F, I I I over four hops, and W of stage 0.
    assert bound([EQUAL] * 3, 1, hop=0.5) == 3 + 3 + 4 * 0.5 + 1


def test_busy_device_waits_for_its_first_forward_and_runs_all_its_work():
    slow = StageCosts(4.0, 4.0, 4.0)
    assert bound([EQUAL, slow], 5) == 1 + 5 * 12


def test_gradient_goes_home_after_the_last_device_but_its_weight_gradients_may_wait():
    last = StageCosts(3.0, 3.0, 0.0625)
    # Device 1: 1 s, ten times F and I, and the way home over stage 0, I and W; its own W overlap with that.
    assert bound([EQUAL, last], 10) == 1 + 10 * 6 + 2


def test_whole_backward_counts_where_it_is_faster_than_its_halves():
    fused = StageCosts(1.0, 1.0, 1.0, backward_s=1.25)
    assert bound([fused], 4) == 4 * 2.25


@pytest.mark.parametrize(("memory", "seconds"), [(1.0, 24.0), (1.9, 24.0), (2.0, 14.0), (3.0, 13.5), (None, 13.5)])
def test_memory_limits_how_many_microbatches_are_on_their_way(memory, seconds):
    # Each is on stage 0 for F, F, I, I and W and two hops of 0.5 s; only whole microbatches are held. With two of them
    # stage 0 has nothing to do from 2 s until the first gradient arrives at 4 s.
    assert bound([EQUAL] * 2, 4, hop=0.5, memory=memory) == pytest.approx(seconds)


def test_tensors_of_next_to_no_bytes_do_not_limit():
    tiny = StageCosts(1.0, 1.0, 1.0, saved_bytes=1.0, freed_by_input_bytes=1.0, created_by_input_bytes=5e-324)
    assert bound([tiny], 2, memory=1.0) == 6.0
