"""Delays by contention, and the links that caused them, on flows by hand."""

import pytest
from panpipe.simulators.delays import added, lost, queue_delays, scaled
from panpipe.simulators.network.flow_times import FlowTimes, Piece

X, Y = ("a", "b"), ("b", "c")


def flow(start, end, *pieces, size=10.0, rate=10.0):
    """A flow of a second without contention; pieces are (start, end, rate, held by)."""
    return FlowTimes((X,), size, rate, start, end, tuple(Piece(*piece) for piece in pieces) or None)


def test_flow_knows_its_time_alone_and_its_pieces():
    free = flow(1.0, 2.0)
    assert free.alone_s == 1.0
    assert free.all_pieces == (Piece(1.0, 2.0, 10.0, None),)
    assert flow(1.0, 3.0, (1.0, 3.0, 5.0, X)).all_pieces == (Piece(1.0, 3.0, 5.0, X),)


def test_flow_loses_the_share_of_its_rate_that_full_links_take():
    # 2 s at half the rate, 4 s at a quarter: 1 s and 3 s are lost.
    assert lost(flow(0.0, 6.0, (0.0, 2.0, 5.0, X), (2.0, 6.0, 2.5, Y))) == {X: 1.0, Y: 3.0}
    assert lost(flow(0.0, 3.0, (0.0, 2.0, 5.0, X), (2.0, 3.0, 10.0, None))) == {X: 1.0}
    assert lost(flow(0.0, 1.0)) == {}


def test_queue_without_contention_has_no_delays():
    assert queue_delays([flow(0.0, 1.0), flow(1.0, 2.0)], [0.0, 0.5]) == [{}, {}]


def test_later_messages_of_a_queue_are_delayed_by_those_before_them():
    slow = flow(0.0, 2.0, (0.0, 2.0, 5.0, X))  # one second late
    assert queue_delays([slow, flow(2.0, 3.0)], [0.0, 0.0]) == [{X: 1.0}, {X: 1.0}]
    # The second one was ready at 1.5 s alone: it would have started then, and starts half a second later.
    assert queue_delays([slow, flow(2.0, 3.0)], [0.0, 1.5]) == [{X: 1.0}, {X: 0.5}]
    assert queue_delays([slow, flow(5.0, 6.0)], [0.0, 5.0]) == [{X: 1.0}, {}]
    both = queue_delays([slow, flow(2.0, 4.0, (2.0, 4.0, 5.0, Y))], [0.0, 0.0])
    assert both[1] == {X: 1.0, Y: 1.0}


def test_delays_are_scaled_down_and_added():
    assert scaled({X: 1.0, Y: 3.0}, 2.0) == {X: 0.5, Y: 1.5}
    assert scaled({X: 1.0}, 5.0) == {X: 1.0}
    assert scaled({X: 1.0}, 0.0) == scaled({X: 1.0}, -1.0) == scaled({}, 1.0) == {}
    assert added([{X: 1.0}, {}, {X: 2.0, Y: 0.5}]) == pytest.approx({X: 3.0, Y: 0.5})
