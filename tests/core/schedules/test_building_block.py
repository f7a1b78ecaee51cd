"""Blocks that users write: what they imply, what they give, and what is refused."""

import json

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.costs.costs import StageCosts
from panpipe.core.documents import to_json
from panpipe.core.errors import RequestError
from panpipe.core.schedules.building_block import FORMAT, Block, building_block, read_block
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.v_shaped import v_half_slots, v_min_slots
from panpipe.core.timing.orders import evaluate

# F, I and W of two stages on two devices, every three slots: 1F1B with its backward split.
LINEAR = Block((0, 1), 3, (0, 1), (5, 3), (7, 5))


def folded(slots, devices):
    forward, back = [0] * 2 * devices, [0] * 2 * devices
    for d in range(devices):
        forward[d], forward[-1 - d], back[-1 - d], back[d] = slots(d, devices)
    there = tuple(range(devices))
    return Block(there + there[::-1], 6, tuple(forward), tuple(back))


@given(st.integers(1, 16))
def test_published_blocks_have_their_published_peaks(devices):
    assert max(folded(v_half_slots, devices).held()) == 2 * ((devices + 2) // 2)
    assert max(folded(v_min_slots, devices).held()) <= 2 * ((devices + 4) // 3)


@settings(deadline=None)
@given(st.integers(1, 12), st.sampled_from([0.0, 0.3]))
def test_schedule_peak_is_at_most_that_of_its_block(microbatches, hop):
    costs = [StageCosts(1, 1.5, 0.5, saved_bytes=1)] * 8
    block = folded(v_half_slots, 4)
    schedule = building_block(ScheduleProblem(4, microbatches, 2, tuple(costs), hop), block=block)
    result = evaluate(schedule.device_actions, schedule.placement, costs, hop_s=hop)
    assert all(mine <= held for mine, held in zip(result.peak_memory, block.held(), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"period": 0}, "the period is 0: it must be from 1"),
        ({"forward": (0, 0)}, "stage 1: F is in slot 0 and reads what stage 0's F computes in slot 0: give it slot 1"),
        ({"input": (3, 3), "weight": ()}, "stage 0: I is in slot 3 and reads what stage 1's I computes in slot 3"),
        ({"weight": (5, 5)}, "stage 0: W is in slot 5 and reads what I computes in slot 5"),
        ({"forward": (0,)}, "forward has 1 slots and there are 2 stages"),
        ({"placement": (0, 2)}, "is not one device for every stage"),
        ({"whole_backward": True}, "slots of W and a whole backward"),
    ],
)
def test_a_wrong_block_is_refused(change, message):
    with pytest.raises(RequestError, match=message):
        evolve(LINEAR, **change)


def test_a_block_for_other_devices_is_refused():
    with pytest.raises(RequestError, match="for 2 devices with 1 stages each and the schedule for 3 with 1"):
        building_block(ScheduleProblem(3, 4), block=LINEAR)
    with pytest.raises(RequestError, match="give --block FILE"):
        building_block(ScheduleProblem(2, 4))


def test_broken_files_are_refused(tmp_path):
    with pytest.raises(RequestError, match="cannot read"):
        read_block(tmp_path / "none.json")
    (tmp_path / "block.json").write_text(to_json(FORMAT, LINEAR), encoding="utf-8")
    data = json.loads((tmp_path / "block.json").read_text(encoding="utf-8"))
    for broken in ({**data, "format": "panpipe.block/9"}, {**data, "slots": []}, {**data, "period": "3"}):
        (tmp_path / "broken.json").write_text(json.dumps(broken), encoding="utf-8")
        with pytest.raises(RequestError, match=r"broken\.json"):
            read_block(tmp_path / "broken.json")
