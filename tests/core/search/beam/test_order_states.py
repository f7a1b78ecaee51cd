"""States of a search over orders: possible actions, and the bound of what is left."""

import numpy as np
import pytest
from panpipe.core.search.beam.order_states import bound_of, find_possible, first_to_end

# Two stages on one device, one microbatch each of 10 bytes, with room for 25: F0, F1, I0, I1, W0, W1 are series 0 to 5.
DEVICE, NEEDS = np.zeros(6, dtype=np.int64), np.array([10.0, 10.0, 0.0, 0.0, 0.0, 0.0])
HOLDS, ROOM = np.full((2, 2), 10.0), np.array([25.0])
FIRST = np.array([0, 0, 1, 3, 4, 5, 6])
SOURCE, APART = np.array([0, 0, 3, 1, 2, 3]), np.zeros(6, dtype=np.int64)


def possible_after(*begun):
    found = np.zeros(6, dtype=np.bool_)
    find_possible(2, np.array(begun), DEVICE, NEEDS, HOLDS, ROOM, FIRST, SOURCE, APART, found)
    return found.nonzero()[0].tolist()


@pytest.mark.parametrize(
    ("begun", "possible"),
    [
        ((0, 0, 0, 0, 0, 0), [0]),
        ((1, 0, 0, 0, 0, 0), [0, 1]),
        ((1, 1, 0, 0, 0, 0), [3]),  # memory for no second F
        ((1, 1, 1, 1, 0, 0), [4, 5]),
        ((1, 1, 1, 1, 1, 0), [0, 5]),
        ((2, 2, 2, 2, 2, 2), []),
    ],
)
def test_possible_actions_have_inputs_and_memory(begun, possible):
    assert possible_after(*begun) == possible


def test_first_to_end_is_a_harmless_action():
    heads = np.array([[0.0], [4.0], [5.0]])
    times, harmless, possible = np.array([1.0, 2.0, 3.0]), np.array([False, True, True]), np.ones(3, dtype=np.bool_)
    assert first_to_end(np.zeros(3, dtype=np.int64), heads, times, harmless, possible) == (6.0, 4.0)


def test_bound_is_the_work_of_the_device_or_the_longest_path():
    times, zero = np.array([2.0, 3.0, 1.0]), np.zeros(3)
    begun, device, heads = (
        np.array([1, 0, 0]),
        np.zeros(3, dtype=np.int64),
        np.array([[0.0, 2.0], [4.0, 7.0], [7.0, 10.0]]),
    )
    tails = np.array([[6.0, 6.0], [4.0, 4.0], [1.0, 1.0]])

    def bound(tails):
        return bound_of(2, begun, heads, tails, times, zero, device, zero, 1)

    assert bound(tails) == 2 + 2 + 2 * (3 + 1)  # F of microbatch 1 from 2 on, then two backwards
    assert bound(tails + 20) == 4 + 2 * 3 + 20 + 1  # both I, and what follows the last one
