"""Host arenas: no two occupied slots overlap, and how much larger than the peak an arena may be."""

from itertools import combinations

import pytest
from attrs import evolve
from hypothesis import given
from panpipe.core.plan.plan import Plan
from panpipe.core.policies.offload import ALIGNMENT_BYTES, host_slots
from panpipe.simulators.run import simulate

from ...support.plans import leaves, offloading_plans, orders, plan_of


def occupied(plan: Plan, device: int) -> list[tuple[int, int, int, int]]:
    """Per slot from which to which position it is occupied, and from which to which byte."""
    at = {str(action): position for position, action in enumerate(plan.device_actions[device])}
    found = []
    for each in plan.memory.offload:
        for copy in each.copies if plan.placement[each.stage] == device else ():
            offsets = host_slots(plan, device).offsets[each.stage, copy.microbatch]
            start, name = at[f"{each.stage}F{copy.microbatch}"], f"{each.stage}{{}}{copy.microbatch}"
            end = at.get(name.format("B"), at.get(name.format("I"), 0))
            for offset, storage in zip(offsets, each.storages, strict=True):
                found.append((start, end, offset, offset + storage.bytes))
    return found


@given(offloading_plans())
def test_no_two_occupied_slots_overlap_and_the_arena_is_near_the_peak(plan):
    timelines = simulate(plan).timelines
    for device in range(plan.devices):
        arena, slots = host_slots(plan, device), occupied(plan, device)
        for (start, end, low, high), (other_start, other_end, other_low, other_high) in combinations(slots, 2):
            apart_in_time = end <= other_start or other_end <= start
            assert apart_in_time or high <= other_low or other_high <= low
        assert all(low % ALIGNMENT_BYTES == 0 and high <= arena.bytes for _, _, low, high in slots)
        own = [each for each in plan.memory.offload if plan.placement[each.stage] == device]
        alone = [host_slots(evolve(plan, memory=evolve(plan.memory, offload=(each,))), device) for each in own]
        assert all(each.bytes == each.peak_bytes for each in alone)
        assert max(arena.peak_bytes, timelines[device].host.max()) <= arena.bytes <= sum(each.bytes for each in alone)


@pytest.mark.parametrize("sizes", [(1000, 1000), (1000, 3000), (700, 1900, 4100)])
def test_arena_of_stages_with_different_sizes_is_within_a_tenth_of_the_peak(sizes):
    """Interleaved forwards, then interleaved backwards, several times over."""
    rows, copies, first = [], [[] for _ in sizes], 0
    for turn in range(6):
        microbatches = range(first, first := first + 2 + turn % 3)
        forwards = [f"{stage}F{m}" for m in microbatches for stage in range(len(sizes))]
        backwards = [f"{stage}B{m}" for m in microbatches for stage in reversed(range(len(sizes)))]
        rows += forwards + backwards
        for stage, found in enumerate(copies):
            found += [f"{m}: {forwards[-1]} {forwards[-1]}" for m in microbatches if f"{stage}F{m}" != forwards[-1]]
    offload = [leaves(stage, sizes[stage], *found) for stage, found in enumerate(copies)]
    plan = plan_of(orders(" ".join(rows)), (0,) * len(sizes), offload=offload)
    arena = host_slots(plan, 0)
    assert arena.peak_bytes <= arena.bytes <= 1.1 * arena.peak_bytes
