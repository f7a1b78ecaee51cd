"""Even cuts of operators with known times."""

import pytest
from panpipe.core.costs.graph import OpGraph, OpNode
from panpipe.core.search.problem.looped_cuts import evened, looped_cuts, prefix_of, spread


def test_prefix_counts_all_of_the_compute_of_the_nodes_before():
    nodes = (OpNode("a", 1.0, 2.0, 3.0), OpNode("b", 0.5, 0.0, 0.25))
    assert prefix_of(OpGraph(nodes, ())) == (0.0, 6.0, 6.75)


@pytest.mark.parametrize(
    ("shares", "cuts"),
    [
        ([1, 1], [0, 4, 8]),
        ([1, 3], [0, 2, 8]),
        ([3, 1], [0, 6, 8]),
        ([1, 0, 0], [0, 6, 7, 8]),
        ([0, 0, 1], [0, 1, 2, 8]),
    ],
)
def test_spread_cuts_in_proportion_to_shares_and_leaves_no_range_empty(shares, cuts):
    assert spread(tuple(map(float, range(9))), 0, 8, shares) == cuts


def test_evened_makes_the_longest_part_as_short_as_possible():
    # 5 │ 1 1 1 │ 3: any other cut has a part of 6 or more.
    assert evened((0.0, 5.0, 6.0, 7.0, 8.0, 11.0), 0, 5, 3) == [0, 1, 4, 5]


def test_looped_cuts_are_even_within_each_loop():
    prefix = tuple(map(float, range(13)))
    assert looped_cuts(prefix, 2, [1.0, 2.0]) == (0, 2, 4, 8, 12)
    assert looped_cuts(prefix, 3, [1.0, 1.0]) == (0, 2, 4, 6, 8, 10, 12)
    assert looped_cuts(prefix, 2, [0.0, 1.0]) == (0, 1, 2, 7, 12)
