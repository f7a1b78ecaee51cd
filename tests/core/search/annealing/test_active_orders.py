"""Orders from keys: sound, within memory, and repeatable."""

import numpy as np
import pytest
from panpipe.core.evaluate.compiled import make_stage_arrays
from panpipe.core.plan.validation.validate import validate
from panpipe.core.search.annealing.active_orders import search_keys
from panpipe.core.search.annealing.packing import one_by_one
from panpipe.core.search.finalize import draft

from ....support.settings import setting_of


def searched(setting, device_of, tries, seed=0):
    """The walk with the fastest of some orders, and the end of its last action."""
    walk = one_by_one(setting, np.array(device_of), np.arange(1, len(device_of)))
    stages, best = len(device_of), walk.best
    costs = make_stage_arrays(stages, setting.edges(stages))
    setting.fill(best, costs)
    limits = np.array(setting.limits)
    end_s = search_keys(
        seed, tries, setting.microbatches, best.placement, costs, limits, best.orders, best.lengths
    )  # fmt: skip
    walk.evaluate()
    return walk, end_s


# A microbatch holds 20 bytes of the first device and 30 of the second.
@pytest.mark.parametrize("memory", [30.0, 35.0, 50.0, 1000.0])
def test_orders_are_sound_and_keep_to_the_memory(memory):
    setting = setting_of([3.0, 1.0, 1.0, 2.0, 2.0], backward=True, saved=10, memory=memory)
    walk, end_s = searched(setting, [0, 1, 0, 1, 1], 100)
    assert walk.excess == 0
    assert walk.step_s == pytest.approx(end_s)
    validate(draft(walk)[0])


def test_no_order_where_a_microbatch_does_not_fit():
    setting = setting_of([1.0] * 4, backward=True, saved=10, memory=29.0)
    _, end_s = searched(setting, [0, 1, 1, 1], 10)
    assert end_s == float("inf")


def test_changed_keys_are_faster_than_drawn_keys():
    setting = setting_of([3.0, 1.0, 4.0, 1.0, 5.0, 2.0], backward=True, microbatches=6)
    few, many = (searched(setting, [0, 1, 0, 1, 1, 0], tries)[1] for tries in (1, 400))
    assert many < few


def test_orders_are_those_of_the_seed():
    setting = setting_of([3.0, 1.0, 4.0, 1.0], backward=True)
    first, again = (searched(setting, [0, 1, 1, 0], 60, seed=5)[0] for _ in range(2))
    assert np.array_equal(first.best.orders, again.best.orders)
