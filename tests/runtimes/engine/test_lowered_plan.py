"""The plan of a step and its lowered actions, for the messages that its microbatches send."""

import itertools

import pytest
import torch
from attrs import evolve
from panpipe.core.actions import Action, Kind
from panpipe.core.capture.programs.stage import Boundary
from panpipe.runtimes.engine.lowered_plan import lowered_plan

from ...support.plans import scheduled


def tensor(gradient: bool = True, rows: int = 2) -> Boundary:
    return Boundary("x", (rows, 3), torch.float32, gradient)


BACKWARDS = (Kind.B, Kind.I)
LAST = (Kind.B, Kind.W)


def runs_to_its_end(plans) -> bool:
    """Whether replicas end if every sum of shared gradients is within the last backward of its microbatch, and ends
    when all replicas take part in it: a replica without the microbatch takes part at the SCATTER_GRAD.

    Args:
        plans: per replica its lowered plan; stages are a chain.
    """
    stages = len(plans[0].plan.stages)
    done, joined = set(), {}
    at = {(replica, device): 0 for replica, found in enumerate(plans) for device in range(len(found.lowered))}

    def reads(action):
        stage, m = action.stage, action.microbatch
        if action.kind is Kind.F:
            return [[Action(stage - 1, Kind.F, m)]] if stage else []
        if action.kind is Kind.W:
            return [[Action(stage, Kind.I, m)]]
        later = [[Action(stage + 1, kind, m) for kind in BACKWARDS]] if stage + 1 < stages else []
        return [[Action(stage, Kind.F, m)], *later]

    def ends(replica, action):
        if action.microbatch is None or action.peer is not None:
            return True
        if action.kind is not Kind.SCATTER_GRAD and not all(
            any((replica, each) in done for each in either) for either in reads(action)
        ):
            return False
        own = action.microbatch < plans[replica].plan.microbatches
        takes_part = action.kind in LAST if own else action.kind is Kind.SCATTER_GRAD
        if takes_part and plans[0].plan.shard[action.stage] == "gradients":
            there = joined.setdefault((action.stage, action.microbatch), set())
            there.add(replica)
            return len(there) == len(plans)
        return True

    moving = True
    while moving:
        moving = False
        for (replica, device), position in at.items():
            row = plans[replica].lowered[device]
            if position < len(row) and ends(replica, row[position]):
                done.add((replica, row[position]))
                at[replica, device], moving = position + 1, True
    return all(position == len(plans[replica].lowered[device]) for (replica, device), position in at.items())


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("gpipe", 1),
        ("1f1b", 1),
        ("zb-h1", 1),
        ("zb-2p", 1),
        ("interleaved-1f1b", 2),
        ("looped", 2),
        ("zb-v", 2),
        ("v-min", 2),
    ],
)
@pytest.mark.parametrize("devices", [2, 3])
def test_replicas_with_any_numbers_of_microbatches_sum_in_one_order_and_end(name, chunks, devices):
    plan = scheduled(name, devices, 6, chunks, data=2)
    levels = ("gradients", "none", "gradients", "optimizer", "gradients", "gradients")
    plan = evolve(plan, shard=levels[: len(plan.stages)])
    layout = {(edge.src, edge.dst): (tensor(),) for edge in plan.edges}
    found = {count: lowered_plan(plan, [layout] * count) for count in (1, 2, 4, 6)}
    sums = (Kind.SCATTER_GRAD, Kind.REDUCE_GRAD)
    orders = [[[a for a in row if a.kind in sums] for row in each.lowered] for each in found.values()]
    assert all(order == orders[0] for order in orders)
    for pair in itertools.product(found, repeat=2):
        assert runs_to_its_end([found[count] for count in pair]), pair


def test_sums_at_the_end_of_a_replica_with_fewer_microbatches_would_not_end():
    """What the test above can find: a replica that takes part in the missing sums too late."""
    plan = evolve(scheduled("1f1b", 2, 6, data=2), shard=("gradients",) * 2)
    layout = {(0, 1): (tensor(),)}
    few, many = (lowered_plan(plan, [layout] * count) for count in (2, 6))
    rows = tuple(tuple(sorted(row, key=lambda a: a.kind is Kind.SCATTER_GRAD and a.stage == 0)) for row in few.lowered)
    assert runs_to_its_end([few, many])
    assert not runs_to_its_end([evolve(few, lowered=(rows[0][::-1], rows[1])), many])
