"""Flows and their routes by hand: links of a route, pieces of equal rate, and drained flows."""

from panpipe.simulators.network.flow_times import Piece
from panpipe.simulators.network.flows import INFINITE, DirectedLink, Route, Shipment


def links(*names):
    return [DirectedLink((name, name.upper()), 10.0) for name in names]


def test_route_has_its_links_and_the_ones_that_both_directions_share():
    first, second, both = links("a", "b", "c")
    route = Route([first, second], 0.5, 10.0, [both])
    assert route.links == (first, second, both)
    assert route.directions == (("a", "A"), ("b", "B"))
    assert (route.shared, route.crossed) == ((), ())


def test_flow_records_pieces_of_its_rate_and_what_held_it():
    (link,) = links("a")
    flow = Shipment(Route([link], 0.5, 10.0), 30.0, lambda: None)
    flow.start_s = flow.since_s = 1.0
    flow.rate, flow.held_by = 5.0, link
    flow.end_piece(1.0)  # nothing has drained since
    assert flow.pieces is None
    flow.end_piece(3.0)
    flow.rate, flow.held_by = 10.0, None
    flow.end_piece(5.0)
    flow.drained_s = 5.0
    pieces = (Piece(1.0, 3.0, 5.0, ("a", "A")), Piece(3.0, 5.0, 10.0, None))
    times = flow.times
    assert times.pieces == pieces
    assert sum((piece.end_s - piece.start_s) * piece.rate for piece in times.pieces) == times.bytes == 30.0
    assert (times.start_s, times.drained_s, times.bytes_per_s) == (1.0, 5.0, 10.0)


def test_flow_without_contention_has_no_pieces():
    flow = Shipment(Route(links("a"), 0.5, 10.0), 30.0, lambda: None)
    assert flow.times.pieces is None
    assert flow.drained_s == INFINITE


def test_link_drops_the_flows_that_have_drained():
    (link,) = links("a")
    link.flows = [Shipment(Route([link], 0.0, 10.0), 1.0, lambda: None) for _ in range(3)]
    for flow, drained_s in zip(link.flows, (1.0, 2.0, INFINITE), strict=True):
        flow.drained_s = drained_s
    _, second, third = link.flows
    link.drop_drained(1.0)
    assert link.flows == [second, third]
    link.drop_drained(2.0)
    assert link.flows == [third]


def test_shipment_calls_back_when_it_has_arrived():
    seen = []
    flow = Shipment(Route(links("a"), 0.0, 10.0), 1.0, lambda: seen.append("arrived"))
    flow.drained()
    assert seen == []
    flow.arrived()
    assert seen == ["arrived"]
