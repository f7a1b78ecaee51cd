"""Sums of gradients over replicas: where lowering inserts them, what waits for them, and what is refused."""

from attrs import evolve
from panpipe.core.actions import parse_action
from panpipe.core.lowering.lowering import lower
from panpipe.core.lowering.queues import queues_of
from panpipe.core.plan.plan import Plan

from ...support.plans import orders, plan_of

PLAN = plan_of(orders("0F0 0F1 0B0 0B1", "1F0 1I0 1F1 1W0 1I1 1W1"), (0, 1), data=2)


def shared(*levels: str) -> Plan:
    return evolve(PLAN, shard=levels)


def lowered(plan: Plan, device: int, old: str, new: str) -> list[list]:
    texts = [" ".join(map(str, actions)) for actions in lower(plan)]
    assert old in texts[device]
    texts[device] = texts[device].replace(old, new)
    return [[parse_action(text) for text in each.split()] for each in texts]


def test_sums_of_microbatches_that_other_replicas_alone_have_are_accepted() -> None:
    plan = shared("gradients", "optimizer")
    more = lowered(plan, 0, "0SCATTER_GRAD1", "0SCATTER_GRAD1 0SCATTER_GRAD2")
    names = [str(task.items[0].action) for task in queues_of(plan, more).tasks]
    assert names[:4] == ["0SCATTER_GRAD0", "0SCATTER_GRAD1", "0SCATTER_GRAD2", "0REDUCE_GRAD"]
