"""Orders of the search's own: complete, within the memory, on cuts that suit their placement."""

import numpy as np
import pytest
from panpipe.core.plan.memory import held_bytes
from panpipe.core.search.annealing.initial_walks import KEPT, list_scheduled

from ....support.settings import setting_of


def found(setting, chunks=1, recompute="none", orders=4):
    return list(list_scheduled(setting, chunks, recompute, orders))


def peaks(setting, each):
    """Saved bytes of every device at the most."""
    schedule = each.schedule
    _, costs, _ = setting.staged(each.cuts, schedule.placement)
    again = np.flatnonzero(each.recompute).tolist()
    return [max(held for held, _ in held_bytes(row, costs, again)) for row in schedule.device_actions]


@pytest.mark.parametrize("chunks", [1, 2])
def test_orders_have_every_action_once_and_keep_to_the_memory(chunks):
    setting = setting_of([1.0] * 8, saved=10, memory=60.0, backward=True)
    some = found(setting, chunks)
    assert some
    for each in some:
        for device, row in enumerate(each.schedule.device_actions):
            assert len(set(row)) == len(row)
            forwards = [action for action in row if action.kind.value == "F"]
            assert len(forwards) == 4 * sum(at == device for at in each.schedule.placement)
        assert max(peaks(setting, each)) <= 60


def test_the_best_few_of_each_cuts_are_given():
    setting = setting_of([1.0] * 8, backward=True)
    some = found(setting, orders=100)
    assert 0 < len(some) <= KEPT
    assert {each.cuts for each in some} == {(0, 4, 8)}
    assert {each.schedule.name for each in some} == {"listed"}


def test_short_memory_adds_cuts_that_fit():
    # Even stages of 40 bytes: device 0 would hold two microbatches of them.
    tight = setting_of([1.0] * 8, saved=10, memory=60.0, backward=True)
    assert (0, 3, 8) in {each.cuts for each in found(tight)}


def test_what_no_cuts_fit_has_no_order():
    assert found(setting_of([1.0] * 8, saved=10, memory=30.0, backward=True)) == []


def test_stages_recompute_where_memory_is_short_and_they_may():
    tight = setting_of([1.0] * 8, saved=10, memory=30.0, backward=True)
    assert found(tight, recompute=None) == []  # one microbatch of its stage runs whole, recomputed or not
    short = setting_of([1.0] * 8, saved=10, memory=60.0, backward=True)
    assert {each.recompute.tolist() == [True, True] for each in found(short, recompute=None)} == {True, False}
    assert not any(each.recompute.any() for each in found(short))
    roomy = setting_of([1.0] * 8, backward=True)
    assert not any(each.recompute.any() for each in found(roomy, recompute=None))
