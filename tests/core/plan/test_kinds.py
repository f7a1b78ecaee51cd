"""Declared kinds: their tasks on a queue of their own, what is refused, and the seconds of compute actions."""

import pytest
from attrs import evolve
from panpipe.core.actions import Action, Kind, declare_kind
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.costs import StageCosts, compute_times
from panpipe.core.errors import RequestError
from panpipe.core.plan.items import Item, Task
from panpipe.core.plan.kinds import declared, movement, own_queue, task_kinds

from ...support.plans import orders, plan_of

TALLY = declare_kind("TALLY")
KIND = own_queue(
    TALLY, "tallies", stages=lambda plan: (0,), after=Kind.F, fence=(Kind.B, Kind.I),
    seconds=lambda cost: 2 * cost.forward_s,
)  # fmt: skip
PLAN = plan_of(orders("0F0 1F0 1B0 0I0 0W0"), (0, 0))
NEEDED = Action(0, TALLY, 0)


def item(issued=1, action=NEEDED):
    return Item(0, "tallies", action, issued, issued)


def tasks(*items, kind=KIND):
    return list(kind.tasks(PLAN, PLAN.device_actions, items, ()))


def test_compute_times_are_the_costs_of_each_kind():
    cost = StageCosts(1.0, 2.0, 4.0, backward_s=5.0, optimizer_s=7.0, recompute_s=0.5)
    assert compute_times(orders("0F0 0I0 0W0 0B0 0RECOMPUTE0 0STEP"), [cost]) == [[1.0, 2.0, 4.0, 5.0, 0.5, 7.0]]


def test_own_queue_inserts_an_action_after_each_compute_action_of_its_stages():
    assert list(KIND.insert(PLAN, 0)) == [(0, NEEDED)]
    nowhere = own_queue(TALLY, "tallies", stages=lambda plan: (), after=Kind.F, fence=(), seconds=lambda cost: 0.0)
    assert list(nowhere.insert(PLAN, 0)) == []


def test_task_of_an_own_queue_is_read_by_the_first_action_of_its_fence():
    assert tasks(item()) == [Task(TALLY, "0TALLY0", "needs tallies", (item(),), ((0, 3),), ("tallies", 0))]
    unread = own_queue(
        TALLY, "tallies", stages=lambda plan: (0,), after=Kind.F, fence=(), seconds=lambda cost: 0.0
    )  # fmt: skip
    assert [task.readers for task in tasks(item(5), kind=unread)] == [()]


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ((), "device 0 issues no 0TALLY0, which the plan needs: add it"),
        ((item(), item(2)), "device 0 issues 0TALLY0, which the plan does not need: remove it"),
        ((item(2, Action(1, TALLY, 0)),), "device 0 issues 1TALLY0, which the plan does not need: remove it"),
        ((item(0),), "0TALLY0 is issued before the action that it follows: move it after that"),
        ((item(4),), "0TALLY0 is issued after 0I0, which waits for it: move it before that"),
    ],
)
def test_own_queue_refuses_an_action_that_is_missing_or_misplaced(items, said):
    with pytest.raises(RequestError, match=said):
        tasks(*items)


def test_a_task_takes_the_time_of_its_kind():
    cost = StageCosts(1.5, 0.0, 0.0)
    with declared(KIND):
        assert movement(tasks(item())[0], PLAN, [cost], fully_connected(1, 1, 1.0, 0.0)).alone_s == 3.0


def test_declared_kind_is_known_inside_its_context_alone():
    other = evolve(KIND, queue="others")
    with declared(KIND):
        with declared(other):
            assert task_kinds()[TALLY] is other
        assert task_kinds()[TALLY] is KIND
    assert TALLY not in task_kinds()
