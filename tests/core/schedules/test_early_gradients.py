"""Gradients sent early: where the halves stand, and what they are worth."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.actions import parse_action
from panpipe.core.costs.costs import StageCosts
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family
from panpipe.core.timing.orders import evaluate

from ...support.early_gradients import early_gradients


def orders(*rows):
    return tuple(tuple(parse_action(word) for word in row.split()) for row in rows)


def built(name, devices, microbatches, costs=None, chunks=1):
    return find_family(name).build(ScheduleProblem(devices, microbatches, chunks, costs))


def test_last_backwards_before_a_send_are_split():
    before = orders("0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")
    assert early_gradients(before, (0, 1), 2) == orders("0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1I1 1W1 1F2 1I2 1W2")


@given(devices=st.integers(2, 6), more=st.integers(0, 6), w=st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_early_gradients_shorten_the_cool_down_by_a_w_per_hop(devices, more, w):
    costs = (StageCosts(7.0, 9.0, float(w), saved_bytes=1),) * devices
    schedule = built("1f1b", devices, devices + more, costs)
    early = early_gradients(schedule.device_actions, schedule.placement, schedule.microbatches)
    before = evaluate(schedule.device_actions, schedule.placement, costs)
    after = evaluate(early, schedule.placement, costs)
    assert after.makespan == pytest.approx(before.makespan - (devices - 1) * w)
    assert after.peak_memory == before.peak_memory
