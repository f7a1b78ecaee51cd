"""Sums of gradients over replicas: where lowering inserts them, what waits for them, and what is refused."""

import pytest
from attrs import evolve
from panpipe.core.actions import Kind, parse_action
from panpipe.core.errors import RequestError
from panpipe.core.lowering.lowering import lower
from panpipe.core.lowering.queues import queues_of
from panpipe.core.plan.plan import Plan
from panpipe.core.policies.replicas import collectives
from panpipe.core.trace.trace import COLLECTIVE_QUEUE

from ...support.plans import orders, plan_of

PLAN = plan_of(orders("0F0 0F1 0B0 0B1", "1F0 1I0 1F1 1W0 1I1 1W1"), (0, 1), data=2)


def shared(*levels: str) -> Plan:
    return evolve(PLAN, shard=levels)


def sums(plan: Plan, device: int) -> str:
    kinds = (Kind.SCATTER_GRAD, Kind.REDUCE_GRAD, Kind.B, Kind.W)
    return " ".join(str(action) for action in lower(plan)[device] if action.kind in kinds)


def test_gradients_of_each_microbatch_are_summed_after_its_last_backward() -> None:
    plan = shared("gradients", "gradients")
    assert sums(plan, 0) == "0B0 0SCATTER_GRAD0 0B1 0SCATTER_GRAD1 0REDUCE_GRAD"
    assert sums(plan, 1) == "1W0 1SCATTER_GRAD0 1W1 1SCATTER_GRAD1 1REDUCE_GRAD"
    assert sums(shared("optimizer", "gradients"), 0) == "0B0 0B1 0REDUCE_GRAD"
    assert collectives(evolve(plan, mesh=evolve(plan.mesh, data=1)), 0) == []


def test_next_backward_waits_and_sums_of_a_device_run_in_the_order_issued() -> None:
    plan = plan_of(orders("0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1"), (0, 0), data=2)
    plan = evolve(plan, shard=("gradients",) * 2)
    queues = queues_of(plan, lower(plan))
    tasks = [(str(task.items[0].action), task.readers) for task in queues.tasks if task.order == (COLLECTIVE_QUEUE, 0)]
    assert tasks[:-2] == [
        ("1SCATTER_GRAD0", ((0, 6),)), ("0SCATTER_GRAD0", ((0, 7),)), ("1SCATTER_GRAD1", ()),
        ("1REDUCE_GRAD", ((0, 9),)), ("0SCATTER_GRAD1", ()), ("0REDUCE_GRAD", ((0, 8),)),
    ]  # fmt: skip
    replicated = queues.replicated(2)
    assert {len(task.items) for task in replicated.tasks} == {2}


def test_next_backward_of_a_stage_that_recomputes_waits_after_its_recomputation() -> None:
    plan = evolve(shared("gradients", "none"), memory=evolve(PLAN.memory, recompute=(0,)))
    queues = queues_of(plan, lower(plan))
    task = next(task for task in queues.tasks if task.kind is Kind.SCATTER_GRAD)
    ((device, position),) = task.readers
    assert str(queues.compute[device][position]) == "0B1"


def lowered(plan: Plan, device: int, old: str, new: str) -> list[list]:
    texts = [" ".join(map(str, actions)) for actions in lower(plan)]
    assert old in texts[device]
    texts[device] = texts[device].replace(old, new)
    return [[parse_action(text) for text in each.split()] for each in texts]


@pytest.mark.parametrize(
    ("device", "old", "new", "reason"),
    [
        (
            0,
            "0SCATTER_GRAD1 ",
            "",
            "device 0 issues no 0SCATTER_GRAD1, and the replicas of stage 0 share gradients: add",
        ),
        (0, "0SCATTER_GRAD1", "0SCATTER_GRAD1 0SCATTER_GRAD1", "device 0 issues 0SCATTER_GRAD1 .* has one already"),
        (0, "0B1 0SCATTER_GRAD1", "0SCATTER_GRAD1 0B1", "0SCATTER_GRAD1 is before 0B1, whose gradients it sums"),
        (0, "0SCATTER_GRAD1 0REDUCE_GRAD", "0REDUCE_GRAD 0SCATTER_GRAD1", "0SCATTER_GRAD1 is after 0REDUCE_GRAD"),
        (1, "1REDUCE_GRAD", "1SCATTER_GRAD0 1REDUCE_GRAD", "the replicas of stage 1 share no gradients, .*: remove it"),
    ],
)
def test_misplaced_sums_are_refused(device: int, old: str, new: str, reason: str) -> None:
    plan = shared("gradients", "optimizer")
    with pytest.raises(RequestError, match=reason):
        queues_of(plan, lowered(plan, device, old, new))


def test_sums_of_microbatches_that_other_replicas_alone_have_are_accepted() -> None:
    plan = shared("gradients", "optimizer")
    more = lowered(plan, 0, "0SCATTER_GRAD1", "0SCATTER_GRAD1 0SCATTER_GRAD2")
    names = [str(task.items[0].action) for task in queues_of(plan, more).tasks]
    assert names[:4] == ["0SCATTER_GRAD0", "0SCATTER_GRAD1", "0SCATTER_GRAD2", "0REDUCE_GRAD"]
