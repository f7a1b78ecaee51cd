"""Queues of a lowered plan: where items are, tasks of replicas, and queues without a kind."""

import pytest
from attrs import evolve
from panpipe.core.actions import Kind
from panpipe.core.lowering.lowering import lower
from panpipe.core.lowering.queues import queues_of
from panpipe.core.plan.plan import TiedWeight

from ...support.plans import orders, plan_of

PLAN = evolve(
    plan_of(orders("0F0 0B0", "1F0 1B0"), (0, 1), data=2, tied=(TiedWeight("w", (0, 1), 8),)), sync=True
)  # fmt: skip
"""Of one replica the tasks are 0 and 1: REDUCE_GRAD of both stages, 2: REDUCE_TIED, 3: SYNC."""


@pytest.fixture
def queues():
    return queues_of(PLAN, lower(PLAN, 0))


def waits(found):
    return [(task.kind.value, [(item.device, item.waits) for item in task.items]) for task in found.tasks]


def test_items_know_their_place_and_the_compute_items_before_them(queues):
    # 0F0 0SEND_F0>1 0RECV_B0<1 0B0 0REDUCE_GRAD 0REDUCE_TIED 0SYNC 0STEP
    found = [(str(task.items[0].action), task.items[0].issued, task.items[0].place) for task in queues.tasks]
    assert found == [("0REDUCE_GRAD", 2, 4), ("1REDUCE_GRAD", 2, 4), ("0REDUCE_TIED", 2, 5), ("0SYNC", 2, 6)]
    assert waits(queues) == [
        ("REDUCE_GRAD", [(0, ())]),
        ("REDUCE_GRAD", [(1, ())]),
        ("REDUCE_TIED", [(0, (0,)), (1, (1,))]),
        ("SYNC", [(0, (0, 2)), (1, (1, 2))]),
    ]


def test_replicas_join_in_reductions_and_sync_and_have_tied_sums_of_their_own(queues):
    found = queues.replicated(2)
    assert waits(found) == [
        ("REDUCE_GRAD", [(0, ()), (2, ())]),
        ("REDUCE_GRAD", [(1, ()), (3, ())]),
        ("REDUCE_TIED", [(0, (0,)), (1, (1,))]),
        ("REDUCE_TIED", [(2, (0,)), (3, (1,))]),
        ("SYNC", [(0, (0, 2)), (1, (1, 2)), (2, (0, 3)), (3, (1, 3))]),
    ]
    assert found.tasks[0].readers == ((0, 2), (2, 2))
    assert [task.order and task.order[1] for task in found.tasks] == [0, 1, None, None, None]


def test_replicas_have_compute_and_messages_of_the_first(queues):
    found = queues.replicated(2)
    assert found.compute == queues.compute * 2
    assert {pair: queues.messages[pair[0] % 2, pair[1] % 2] for pair in found.messages} == found.messages
    assert set(found.messages) == {(0, 1), (1, 0), (2, 3), (3, 2)}
    assert queues.replicated(1) is queues


def test_nothing_waits_for_tasks_of_a_kind_that_is_left_out(queues):
    assert waits(queues.without(Kind.REDUCE_TIED))[2:] == [("SYNC", [(0, (0,)), (1, (1,))])]
    assert waits(queues.without(Kind.REDUCE_GRAD)) == [
        ("REDUCE_TIED", [(0, ()), (1, ())]),
        ("SYNC", [(0, (0,)), (1, (0,))]),
    ]
    assert queues.without(Kind.OFFLOAD) is queues
