"""Messages of coded orders by hand: their order per pair, who sends them, and where their receives are posted."""

import numpy as np
import pytest
from panpipe.core.costs.costs import StageCosts
from panpipe.core.evaluate.coding import INPUT, KINDS, encode
from panpipe.core.evaluate.compiled import make_stage_arrays
from panpipe.core.evaluate.contended import _fill_where, all_messages
from panpipe.core.plan.lowering import lower
from panpipe.core.schedules.construction.instance import instance
from panpipe.core.schedules.problem import ScheduleProblem

from ...support.plans import orders, scheduled


def messages_of(rows, placement, count, *, sizes=(10.0, 20.0)):
    """Per pair of devices its messages: (position after which it is sent, position that posts it, source, size)."""
    chain = ScheduleProblem(len(rows), count, len(placement) // len(rows), [StageCosts(1, 1, 1)] * len(placement))
    _, device_of, costs, _ = instance(chain, placement).for_orders()
    costs.forward_bytes[:], costs.back_bytes[:] = sizes
    coded, lengths = encode(rows, len(placement), count)
    scratch = instance(chain, placement).scratch()
    _fill_where(coded, lengths, scratch.where)
    found = all_messages(coded, lengths, count, device_of, costs, scratch)
    devices = len(rows)
    return found, {
        (a, b): [
            (int(found.issued[m]), int(found.posted[m]), int(found.source[m]), float(found.size[m]))
            for m in range(found.begins[a * devices + b], found.begins[a * devices + b + 1])
        ]
        for a in range(devices)
        for b in range(devices)
    }


def code(stage, kind, microbatch, count):
    return KINDS * (stage * count + microbatch) + kind


def test_messages_of_two_devices_by_hand():
    found, pairs = messages_of(orders("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), (0, 1), 2)
    # Receives are posted two actions before their readers, at the earliest at the start.
    assert pairs[0, 1] == [(0, 0, code(0, 0, 0, 2), 10.0), (1, 0, code(0, 0, 1, 2), 10.0)]
    assert pairs[1, 0] == [(1, 0, code(1, INPUT, 0, 2), 20.0), (3, 1, code(1, INPUT, 1, 2), 20.0)]
    assert pairs[0, 0] == pairs[1, 1] == []
    # One message for each reader: F of stage 1 and the gradients of stage 0.
    assert found.pending.tolist() == [0, 1, 0, 1, 1, 0, 1, 0]


def test_gradient_is_sent_by_i_and_not_by_w():
    _, pairs = messages_of(orders("0F0 0I0 0W0", "1F0 1I0 1W0"), (0, 1), 1)
    assert pairs[1, 0] == [(1, 0, code(1, INPUT, 0, 1), 20.0)]


def test_stages_of_one_device_exchange_no_messages():
    found, pairs = messages_of(orders("0F0 1F0 1B0 0B0"), (0, 0), 1)
    assert pairs == {(0, 0): []}
    assert not found.pending.any()


def test_receive_is_posted_no_later_than_the_next_one_of_its_queue():
    # Device 1 reads the first message last: its receive must be posted before that of the second message.
    rows = orders("0F0 0F1 0B0 0B1", "1F1 1B1 1F0 1B0")
    _, pairs = messages_of(rows, (0, 1), 2)
    assert [posted for _, posted, *_ in pairs[0, 1]] == [0, 0]


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved-1f1b", 2), ("zb-v", 2)])
def test_receives_are_posted_where_lowering_places_them(name, chunks):
    plan = scheduled(name, 3, 6, chunks)
    _, pairs = messages_of(plan.device_actions, plan.placement, 6)
    lowered, wanted = lower(plan), {pair: [] for pair in pairs}
    for device, actions in enumerate(lowered):
        computed = 0
        for action in actions:
            if action.kind.value.startswith("RECV"):
                wanted[plan.placement[action.peer], device].append(computed)
            elif action.peer is None and action.microbatch is not None:
                computed += 1
    for pair, posted in wanted.items():
        assert [at for _, at, *_ in pairs[pair]] == posted, pair


def test_costs_without_edges_have_no_messages():
    placement = np.array([0, 1])
    coded, lengths = encode(orders("0F0 0B0", "1F0 1B0"), 2, 1)
    scratch = instance(ScheduleProblem(2, 1), (0, 1)).scratch()
    _fill_where(coded, lengths, scratch.where)
    found = all_messages(coded, lengths, 1, placement, make_stage_arrays(2, 0), scratch)
    assert (found.begins.tolist(), found.size.tolist()) == ([0] * 5, [])
