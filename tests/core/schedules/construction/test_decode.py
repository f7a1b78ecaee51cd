"""Orders from keys, by hand: keys, memory, caps, patience and giving up; and random keys, which never deadlock."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.costs.costs import StageCosts
from panpipe.core.evaluate.reference import evaluate
from panpipe.core.schedules.construction.decode import Priorities, decode
from panpipe.core.schedules.construction.instance import instance
from panpipe.core.schedules.problem import ScheduleProblem, folded_placement

UNIT = StageCosts(1, 1, 1, saved_bytes=1)
LATE_WEIGHTS, DEPTH_FIRST = (0, 1, 2), (2, 1, 0)


def decoded(problem, keys, *, placement=None, patience=0.0, caps=None, fused=False, stop=np.inf):
    """The makespan, the mean end and the rows of a problem's keys: one number for each kind, or all of them."""
    task = instance(problem, placement or range(problem.devices))
    stages, count = len(task.placement), problem.microbatches
    keys = np.array(keys, dtype=float)
    if keys.ndim == 1:
        keys = np.broadcast_to(keys[:, None, None], (3, stages, count)).copy()
    whole = np.full(stages, fused)
    orders = np.empty((problem.devices, 3 * problem.chunks * count), dtype=np.int64)
    lengths = np.zeros(problem.devices, dtype=np.int64)
    priorities = Priorities(keys, np.full(3, patience), np.full(stages, caps or count))
    times = decode(task.scheduler_input(whole), priorities, orders, lengths, stop)
    schedule = task.schedule("", orders, lengths)
    return *times, [" ".join(map(str, row)) for row in schedule.device_actions]


def one(limit=None, cost=UNIT):
    return ScheduleProblem(1, 2, costs=[cost], memory_limit=limit)


def test_smallest_key_of_those_available_runs_first():
    assert decoded(one(), LATE_WEIGHTS) == (6, 6, ["0F0 0F1 0I0 0I1 0W0 0W1"])
    assert decoded(one(), DEPTH_FIRST) == (6, 6, ["0F0 0I0 0W0 0F1 0I1 0W1"])
    assert decoded(one(), [[[0, 4]], [[1, 5]], [[6, 7]]]) == (6, 6, ["0F0 0I0 0F1 0I1 0W0 0W1"])


def test_forward_waits_until_memory_is_free():
    assert decoded(one(1.0), LATE_WEIGHTS)[2] == ["0F0 0I0 0W0 0F1 0I1 0W1"]
    half = StageCosts(1, 1, 1, saved_bytes=1, freed_by_input_bytes=1)  # nothing is left for W
    assert decoded(one(1.0, half), LATE_WEIGHTS)[2] == ["0F0 0I0 0F1 0I1 0W0 0W1"]


def test_stage_holds_no_more_microbatches_than_its_cap():
    assert decoded(one(), LATE_WEIGHTS, caps=1)[2] == ["0F0 0I0 0W0 0F1 0I1 0W1"]


def test_fused_stage_runs_whole_backwards():
    cost = StageCosts(1, 1, 1, backward_s=1.5, saved_bytes=1)
    span, _, rows = decoded(one(None, cost), LATE_WEIGHTS, fused=True)
    assert (span, rows) == (5, ["0F0 0F1 0B0 0B1"])


@pytest.mark.parametrize(("patience", "third"), [(0.4, "0F2"), (0.6, "0I0")])
def test_device_waits_within_its_patience_for_an_action_with_a_smaller_key(patience, third):
    # Device 0 has run two forwards at 2, and the gradient that it prefers arrives at 2.5.
    costs = [UNIT, StageCosts(0.25, 0.25, 0.25, saved_bytes=1)]
    rows = decoded(ScheduleProblem(2, 3, costs=costs, hop_s=0.5), (1, 0, 2), patience=patience)[2]
    assert rows[0].split()[2] == third


def test_mean_end_is_that_of_all_devices():
    costs = [UNIT, StageCosts(1, 1, 0, saved_bytes=1)]
    assert decoded(ScheduleProblem(2, 1, costs=costs), LATE_WEIGHTS)[:2] == (5, 4)


def test_decoding_ends_once_the_order_is_certain_to_be_slower():
    # The makespan is 6, and a thousandth of the mean end is added.
    assert decoded(one(), LATE_WEIGHTS, stop=6.007)[0] == 6
    assert decoded(one(), LATE_WEIGHTS, stop=6.005)[0] == np.inf


@settings(max_examples=15)
@given(st.integers(1, 3), st.integers(1, 5), st.floats(1.0, 2.5), st.integers(0, 2**32 - 1))
def test_any_keys_give_a_whole_order_within_any_limit_that_fits_one_microbatch(devices, count, room, seed):
    draw = np.random.default_rng(seed)
    costs = [StageCosts(1, 1.5, 0.5, saved_bytes=float(draw.integers(1, 9))) for _ in range(2 * devices)]
    placement = folded_placement(devices, 2)
    free = ScheduleProblem(devices, count, 2, costs, 0.25)
    limit = instance(free, placement).least_memory * room
    problem = ScheduleProblem(devices, count, 2, costs, 0.25, limit)
    task = instance(problem, placement)
    orders, lengths = np.empty((devices, 6 * count), dtype=np.int64), np.zeros(devices, dtype=np.int64)
    fused = np.zeros(2 * devices, dtype=np.bool_)
    priorities = Priorities(draw.random((3, 2 * devices, count)), draw.random(3), np.full(2 * devices, count))
    span, _ = decode(task.scheduler_input(fused), priorities, orders, lengths)
    assert lengths.tolist() == [6 * count] * devices
    result = evaluate(task.schedule("", orders, lengths).device_actions, placement, costs, hop_s=0.25)
    assert result.makespan <= span * (1 + 1e-9)
    assert max(result.peak_memory) <= limit * (1 + 1e-9)
