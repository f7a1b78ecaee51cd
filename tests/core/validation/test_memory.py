"""Peaks against limits: what fits, what only warns, and the changes that a refusal names."""

import numpy as np
import pytest
from panpipe.core.costs.costs import StageCosts
from panpipe.core.errors import InfeasibleError
from panpipe.core.lowering.residency import Timeline
from panpipe.core.validation.validate import check_memory

from ...support.plans import orders, plan_of

ROW = "0F0 0F1 0B0 0B1"


def timeline(saved, communication=0.0, workspace=0.0, state=0.0, row=ROW):
    """Memory of a device at the start of each of its actions."""
    actions = orders(row)[0]
    moving = np.zeros((3, max(len(actions), 1)))
    moving[0], moving[1], moving[2] = saved, communication, workspace
    at = np.arange(moving.shape[1])
    return Timeline((state, 0.0, 0.0), at.astype(float), moving, np.zeros(len(at)), at, actions)


def check(limit, memory, *, recompute=(), **costs):
    cost = StageCosts(1.0, 1.0, 1.0, **{"saved_bytes": 100, "input_bytes": 30} | costs)
    return check_memory(plan_of(orders(ROW), (0,), recompute=recompute), [cost], [memory], [limit])


def refusal(limit, memory, **given):
    with pytest.raises(InfeasibleError) as error:
        check(limit, memory, **given)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_peak_at_the_limit_fits_and_communication_buffers_above_it_are_a_warning():
    assert check(200, timeline([100, 200, 200, 100])) == []
    assert check(209, timeline([100, 200, 200, 100], communication=[0, 10, 0, 0])) == [
        "device 0 holds 210 bytes at 0F1 with its communication buffers and has 209: 1 too many if all buffers are in "
        "use"
    ]


def test_refusal_names_the_first_action_at_the_peak_of_state_saved_tensors_and_workspace():
    said = refusal(212, timeline([100, 200, 200, 100], workspace=[1, 2, 3, 3], state=10))
    assert said.startswith("device 0 holds 213 bytes at 0B0 and has 212: 1 too many; give the device 1 bytes more")
    # 0B0 runs: its microbatch is still held.
    assert "start 1 fewer of the 2 microbatches that stage 0 holds then (100 bytes each)" in said


def test_recompute_is_named_where_it_frees_enough():
    held = timeline([100, 200, 200, 100])
    # Of two microbatches one would hold 30 bytes in place of 100.
    assert ", or recompute stage 0 (it keeps 30 bytes of a microbatch then, and saves 100 now)" in refusal(130, held)
    assert "recompute" not in refusal(129, held)


def test_stage_that_recomputes_already_holds_its_inputs():
    said = refusal(50, timeline([30, 60, 60, 30]), recompute=(0,))
    assert said.endswith("or start 1 fewer of the 2 microbatches that stage 0 holds then (30 bytes each)")
    assert "or recompute" not in said


def test_smaller_microbatches_are_named_where_fewer_of_them_do_not_help():
    said = refusal(90, timeline([100, 200, 200, 100]))
    assert said.endswith("or cut the batch into more microbatches (stage 0 saves 100 bytes of each)")


def test_stage_that_saves_nothing_leaves_more_memory_alone():
    said = refusal(5, timeline(0.0, workspace=7), saved_bytes=0, input_bytes=0)
    assert said.endswith("2 too many; give the device 2 bytes more")


def test_state_above_the_limit_is_named_by_itself_for_a_device_without_actions_too():
    for row, at in ((ROW, "at 0F0"), ("", "before anything runs")):
        said = refusal(8, timeline(0.0, state=10, row=row))
        assert said == (
            f"device 0 holds 10 bytes {at} and has 8: 2 too many; its parameters, gradients and optimizer state alone "
            "are 2 too many; move operators to another device, or give the device 2 bytes more"
        )
