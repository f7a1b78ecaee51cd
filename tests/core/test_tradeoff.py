"""Time against memory: equal times are ordered by memory, and the frontier has what nothing else beats."""

import itertools

from hypothesis import given
from hypothesis import strategies as st
from panpipe.core.tradeoff import EQUAL, by_time, frontier

NOISE = EQUAL / 100
ITEMS = st.lists(
    st.tuples(st.sampled_from([1.0, 1.0 + NOISE, 1.0 - NOISE, 1.5, 2.0, 2.0 * (1 + NOISE)]), st.integers(0, 4)),
    max_size=8,
)


def first(item):
    return item[0]


def second(item):
    return item[1]


def test_equal_times_are_ordered_by_memory_and_equals_keep_their_order():
    items = [(1.0, 5, "a"), (1.0 + NOISE, 3, "b"), (2.0, 1, "c"), (1.0 - NOISE, 3, "d"), (1.0 + 1e-6, 2, "e")]
    assert [item[2] for item in by_time(items, first, second)] == ["b", "d", "a", "e", "c"]


def test_frontier_leaves_out_more_memory_for_the_same_time():
    items = [(1.0, 5, "a"), (1.0 + NOISE, 3, "b"), (2.0, 1, "c"), (3.0, 1 - NOISE, "d"), (1.2, 4, "e")]
    assert [item[2] for item in frontier(items, first, second)] == ["b", "c"]
    assert frontier([], first, second) == []


@given(ITEMS)
def test_every_item_is_beaten_or_equalled_by_one_of_the_frontier(items):
    best = frontier(items, first, second)
    assert set(best) <= set(items)
    for item in items:
        assert any(kept[0] <= item[0] * (1 + EQUAL) and kept[1] <= item[1] for kept in best)
    assert all(one[0] < other[0] and one[1] > other[1] for one, other in itertools.pairwise(best))
