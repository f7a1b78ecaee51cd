"""What messages cost the devices at their ends: by size, and put on the stages that they leave and reach."""

import pytest
from panpipe.core.costs.costs import StageCosts, StageEdge
from panpipe.core.costs.message_overhead import MessageLine, MessageTimes, typical, with_message_times

TIMES = MessageTimes(send={100: 1.0, 300: 3.0}, receive={100: 0.25})
PROGRAMS = [StageCosts(10.0, 20.0, 30.0, backward_s=45.0)] * 3


@pytest.mark.parametrize(("size", "seconds"), [(100, 1.0), (200, 2.0), (300, 3.0), (1, 1.0), (1000, 3.0)])
def test_time_is_linear_between_known_sizes_and_constant_beyond_them(size, seconds):
    assert TIMES.send_s(size) == seconds
    assert TIMES.receive_s(size) == 0.25


def test_messages_that_were_never_sent_take_no_time():
    assert MessageTimes({}, {}).send_s(7) == 0.0


def test_typical_time_of_each_size_is_the_quantile_over_steps():
    seen = [MessageTimes({8: 1.0}, {}), MessageTimes({8: 3.0, 4: 5.0}, {8: 2.0}), MessageTimes({8: 2.0}, {})]
    assert typical(seen, 0.5) == MessageTimes({4: 5.0, 8: 2.0}, {8: 2.0})


def test_messages_between_devices_cost_both_ends():
    edges = [StageEdge(0, 1, 100, 300), StageEdge(1, 2, 100, 100)]
    costs = with_message_times(PROGRAMS, (0, 1, 1), edges, TIMES)
    ahead = [(cost.forward_s, cost.full_backward_s, cost.backward_input_s, cost.backward_weight_s) for cost in costs]
    # Stage 0 sends 100 bytes and gets 300 back; stage 2 is on the device of stage 1.
    assert ahead == [(11.0, 45.25, 20.25, 30.0), (10.25, 48.0, 23.0, 30.0), (10.0, 45.0, 20.0, 30.0)]


def test_an_edge_without_gradients_costs_the_forward_alone():
    costs = with_message_times(PROGRAMS, (0, 1, 0), [StageEdge(0, 1, 200, 0)], TIMES)
    assert [(c.forward_s, c.full_backward_s) for c in costs] == [(12.0, 45.0), (10.25, 45.0), (10.0, 45.0)]


def test_a_line_costs_both_ends_the_same():
    edges, line = [StageEdge(0, 1, 4, 2), StageEdge(1, 2, 4, 4)], MessageLine(0.5, 0.25)
    costs = with_message_times(PROGRAMS, (0, 1, 0), edges, line)
    assert [c.forward_s for c in costs] == [11.5, 13.0, 11.5]
    assert [c.backward_input_s for c in costs] == [21.0, 22.5, 21.5]
    assert [c.second_forward_s for c in costs] == [10.0, 10.0, 10.0]  # what a forward reads the second time is there
