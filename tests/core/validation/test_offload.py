"""Offload in a plan: what is refused, each with the place, the value and the rule."""

import re

import pytest
from attrs import evolve
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.costs import StageCosts
from panpipe.core.errors import RequestError
from panpipe.core.lowering.derive import forward_only
from panpipe.core.validation.structure import check_offload
from panpipe.core.validation.validate import validate

from ...support.plans import hosted, leaves, orders, plan_of

COST = StageCosts(1.0, 1.0, 1.0, saved_bytes=300)
PLAN = plan_of(
    orders("0F0 0F1 0F2 0B0 0B1 0B2"), (0,), costs=[COST], cluster=hosted(fully_connected(1, 10**6, 1.0, 0.0), 100.0),
    offload=[leaves(0, 200, "1: 0F2 0F2", "2: 0B0 0B0")],
)  # fmt: skip


def with_offload(*found):
    return evolve(PLAN, memory=evolve(PLAN.memory, offload=found))


BAD_PLANS = {
    "memory.offload names stages [4]": with_offload(leaves(4, 200, "1: 0F2 0F2")),
    "memory.offload names stages [0, 0]": with_offload(*PLAN.memory.offload * 2),
    "the stage is also in memory.recompute": evolve(PLAN, memory=evolve(PLAN.memory, recompute=(0,))),
    "memory.host_copy_queues is 3": evolve(PLAN, memory=evolve(PLAN.memory, host_copy_queues=3)),
    "stage 0 names no storages": with_offload(evolve(PLAN.memory.offload[0], storages=())),
    "names storage 'operator0' twice": with_offload(
        evolve(PLAN.memory.offload[0], storages=PLAN.memory.offload[0].storages * 2)
    ),
    "storage 'operator0' has 0 bytes": with_offload(leaves(0, 0, "1: 0F2 0F2")),
    "its storages have 301 bytes, and the stage saves 300": with_offload(leaves(0, 301, "1: 0F2 0F2")),
    "stage 0 has no copies": with_offload(leaves(0, 200)),
    "has copies of microbatches [3]: they go from 0 to 2": with_offload(leaves(0, 200, "3: 0F2 0F2")),
    "has copies of microbatches [1, 1]": with_offload(leaves(0, 200, "1: 0F2 0F2", "1: 0F2 0F2")),
    "has copies of microbatches [2, 1]": with_offload(leaves(0, 200, "2: 0B0 0B0", "1: 0F2 0F2")),
    "freed_at is 0I0, which is not in the order of device 0": with_offload(leaves(0, 200, "1: 0I0 0B0")),
    "reload_after is 0STEP, which is not compute": with_offload(leaves(0, 200, "1: 0F2 0STEP")),
    "freed_at is 0F1, which is not after 0F1": with_offload(leaves(0, 200, "1: 0F1 0F2")),
    "reload_after is 0F2, which is before freed_at, 0B0": with_offload(leaves(0, 200, "1: 0B0 0F2")),
    "reload_after is 0B1, and 0B1 reads the saved tensors": with_offload(leaves(0, 200, "1: 0F2 0B1")),
    "reload_after is 0B2, and 0B1 reads the saved tensors": with_offload(leaves(0, 200, "1: 0F2 0B2")),
    "forward only and has memory.offload: 0": evolve(forward_only(PLAN), memory=PLAN.memory),
}


@pytest.mark.parametrize("said", BAD_PLANS)
def test_bad_offload_is_refused(said):
    with pytest.raises(RequestError, match=re.escape(said)) as refusal:
        validate(BAD_PLANS[said])
    assert "\n" not in str(refusal.value)


def test_sound_offload_is_accepted_up_to_all_that_the_stage_saves():
    check_offload(PLAN)
    check_offload(with_offload(leaves(0, 300, "0: 0F1 0F1", "1: 0F2 0B0", "2: 0B0 0B1")))
    check_offload(evolve(with_offload(leaves(0, 301, "1: 0F2 0F2")), prediction=None))  # nothing is known of its size


def test_input_gradient_is_the_backward_of_a_split_one():
    split = plan_of(orders("0F0 0F1 0I0 0W0 0I1 0W1"), (0,), costs=[COST])
    for back, refused in (("0W0", False), ("0I1", True)):
        plan = evolve(split, memory=evolve(split.memory, offload=(leaves(0, 10, f"1: 0I0 {back}"),)))
        if not refused:
            check_offload(plan)
            continue
        with pytest.raises(RequestError, match="reload_after is 0I1, and 0I1 reads the saved tensors"):
            check_offload(plan)
