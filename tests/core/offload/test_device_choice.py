"""What one device can offload: shares of its bytes, the storages of a share, and the peaks that follow."""

import pytest
from panpipe.core.actions import parse_action
from panpipe.core.costs.costs import StageCosts
from panpipe.core.offload.choice import INFINITY, STEPS, DeviceChoice
from panpipe.core.offload.copy_times import Clock
from panpipe.core.offload.host_links import HostLink
from panpipe.core.plan.memory_policy import Storage

ORDER = [parse_action(f"0{kind}{microbatch}") for kind in "FB" for microbatch in range(8)]  # GPipe
CLOCK = Clock([float(at) for at in range(16)], [at + 1.0 for at in range(16)])
PARTS = (Storage("small", 10), Storage("large", 30))
LINK = HostLink(400.0, 400.0)


def choice(order=ORDER, clock=CLOCK, storages=(PARTS,), link=LINK, **more):
    costs = [StageCosts(1, 1, 1, saved_bytes=40, workspace_bytes=5)] * len(storages)
    return DeviceChoice(order, clock, costs, storages, link, **more)


def test_shares_fill_the_stage_whose_tensors_are_held_longest_first():
    order = [parse_action(name) for name in ["0F0", "1F0", "1B0", "0B0"]]
    clock = Clock([0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0])
    both = choice(order, clock, (PARTS, PARTS))
    assert both.shares(0) == {}
    assert both.shares(STEPS // 4) == {0: 0.5}
    assert both.shares(3 * STEPS // 4) == {0: 1.0, 1: 0.5}
    assert both.shares(STEPS) == {0: 1.0, 1: 1.0}


def test_share_takes_the_largest_storages_and_divides_microbatches_where_these_are_too_coarse():
    assert choice().chosen({0: 0.75}).storages == {0: (PARTS[1],)}
    halves = choice(storages=((Storage("all", 40),),)).chosen({0: 0.5})
    assert halves.labels == ((0, 1), (0, 3), (0, 5), (0, 7))
    assert [stay.bytes for stay in halves.stays] == [40] * 4


@pytest.mark.parametrize("more", [{"link": None}, {"recompute": (0,)}, {"storages": ((),)}])
def test_nothing_can_be_offloaded(more):
    assert choice(**more).shares(STEPS) == {}


def test_peak_counts_saved_tensors_and_the_workspace_of_the_running_action():
    one = choice()
    assert one.peak_bytes([]) == 8 * 40 + 5
    assert one.peak_within(325) == 325
    assert one.fewest_within(325) == 0


def test_fewest_steps_within_a_limit_are_fewer_for_a_higher_limit():
    one = choice()
    steps = [one.fewest_within(limit) for limit in (325, 260, 220)]
    assert steps == sorted(steps)
    assert all(one.peak_within(limit) <= limit for limit in (325, 260, 220))


def test_steps_that_the_host_has_no_memory_for_are_not_taken():
    free, small = choice(), choice(host_limit=30.0)
    assert free.host_bytes([copy for copy in free.copies(free.chosen(free.shares(STEPS))) if copy]) > 30
    assert small.peak_within(220) > free.peak_within(220)
    assert small.peak_within(220) < INFINITY


@pytest.mark.parametrize(("rate", "copied"), [(1e9, True), (1e-3, False)])
def test_everything_is_what_a_link_carries_while_the_tensors_are_held(rate, copied):
    one = choice(link=HostLink(rate, rate))
    copies = one.copies(one.chosen(one.shares(one.most_that_the_link_carries())))
    assert len(copies) == 8
    assert any(copies) is copied
