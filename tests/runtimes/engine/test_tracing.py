"""The trace of a step from the records of its devices, by hand: messages, reductions, copies, and costs of messages."""

from attrs import evolve
from panpipe.core.actions import parse_action
from panpipe.core.costs.message_overhead import MessageTimes
from panpipe.core.trace.trace import COLLECTIVE_QUEUE, COMPUTE_QUEUE, HOST_COPY_QUEUE, HOST_MEMORY
from panpipe.runtimes.engine.step_data import StepRecord
from panpipe.runtimes.engine.tracing import measured_trace, message_times

from ...support.plans import leaves, orders, plan_of

PLAN = plan_of(orders("0F0 0B0", "1F0 1B0"), (0, 1))
SECOND = 10**9


def event(text, queue, start, end, size=0):
    return parse_action(text), queue, start * SECOND, end * SECOND, size


def record(*events, start=0, end=10, **more):
    return StepRecord({}, start_ns=start * SECOND, end_ns=end * SECOND, events=list(events), **more)


SENDER = record(event("0F0", COMPUTE_QUEUE, 1, 3), event("0SEND_F0>1", "send to 1", 3, 4, 64), start=1)
READER = record(
    event("1RECV_F0<0", "receive from 0", 2, 2, 64), event("1F0", COMPUTE_QUEUE, 7, 9),
    arrivals={parse_action("1RECV_F0<0"): 6 * SECOND},
)  # fmt: skip


def spans(trace):
    return {(each.device, str(each.action)): (each.queue, each.start_s, each.end_s) for each in trace.events}


def test_message_runs_from_the_later_of_its_two_ends_until_its_reader_has_waited():
    trace = measured_trace(PLAN, [SENDER, READER])
    assert spans(trace) == {
        (0, "0F0"): (COMPUTE_QUEUE, 1, 3), (0, "0SEND_F0>1"): ("send to 1", 3, 6),
        (1, "1RECV_F0<0"): ("receive from 0", 3, 6), (1, "1F0"): (COMPUTE_QUEUE, 7, 9),
    }  # fmt: skip
    assert (trace.source, trace.devices, trace.step_s, trace.plan_hash) == ("measured", 2, 10, PLAN.hash)
    assert not any(each.reported for each in trace.events)


def test_times_begin_with_the_first_device():
    later = [evolve(each, start_ns=each.start_ns + 2 * SECOND) for each in (SENDER, READER)]
    trace = measured_trace(PLAN, later)  # device 1 starts at 2 s
    assert spans(trace)[0, "0F0"] == (COMPUTE_QUEUE, -1, 1)
    assert trace.step_s == 8


def test_reported_transfer_has_the_transports_times():
    sent = evolve(SENDER, spans={parse_action("0SEND_F0>1"): (4 * SECOND, 5 * SECOND)})
    trace = measured_trace(PLAN, [sent, READER])
    assert spans(trace)[0, "0SEND_F0>1"] == ("send to 1", 4, 5)
    assert spans(trace)[1, "1RECV_F0<0"] == ("receive from 0", 4, 5)
    assert [str(each.action) for each in trace.events if each.reported] == ["0SEND_F0>1", "1RECV_F0<0"]


def test_messages_of_a_second_replica_are_between_its_own_ranks():
    plan = plan_of(orders("0F0 0B0", "1F0 1B0"), (0, 1), data=2)
    trace = measured_trace(plan, [SENDER, READER, SENDER, READER])
    assert spans(trace)[2, "0SEND_F0>1"] == ("send to 3", 3, 6)
    assert spans(trace)[3, "1RECV_F0<0"] == ("receive from 2", 3, 6)


def test_reduction_over_replicas_starts_when_the_last_one_has_issued_it():
    plan = plan_of(orders("0F0 0B0"), (0,), data=2)
    reduce = parse_action("0REDUCE_GRAD")
    first = record(event("0REDUCE_GRAD", COLLECTIVE_QUEUE, 2, 2, 8), arrivals={reduce: 7 * SECOND})
    second = record(event("0REDUCE_GRAD", COLLECTIVE_QUEUE, 5, 5, 8), arrivals={reduce: 4 * SECOND})
    found = spans(measured_trace(plan, [first, second]))
    assert found[0, "0REDUCE_GRAD"] == (COLLECTIVE_QUEUE, 5, 7)
    assert found[1, "0REDUCE_GRAD"] == (COLLECTIVE_QUEUE, 5, 5)  # it ends no earlier than it starts


def test_offloaded_bytes_are_on_the_host_from_the_issue_to_the_backward():
    away = leaves(0, 100, "0: 0F1 0F1", "1: 0B0 0B0")
    plan = plan_of(orders("0F0 0F1 0B0 0B1"), (0,), offload=[away])
    given = record(
        event("0OFFLOAD0", HOST_COPY_QUEUE, 2, 2, 100), event("0OFFLOAD1", HOST_COPY_QUEUE, 3, 3, 50),
        event("0RELOAD0", HOST_COPY_QUEUE, 4, 4, 100), event("0B0", COMPUTE_QUEUE, 5, 6),
        event("0RELOAD1", HOST_COPY_QUEUE, 6, 6, 50), event("0B1", COMPUTE_QUEUE, 6, 7),
        arrivals={parse_action("0OFFLOAD0"): 4 * SECOND}, started={parse_action("0OFFLOAD0"): 3 * SECOND},
        memory=[(1 * SECOND, 100)],
    )  # fmt: skip
    trace = measured_trace(plan, [given])
    assert [(s.time_s, s.bytes) for s in trace.memory if s.kind == HOST_MEMORY] == [(2, 100), (3, 150), (5, 50), (6, 0)]
    assert [(s.time_s, s.bytes) for s in trace.memory if s.kind == "saved"] == [(1, 100)]
    assert spans(trace)[0, "0OFFLOAD0"] == (HOST_COPY_QUEUE, 3, 4)


def test_costs_of_messages_are_the_means_of_their_calls_by_size():
    sent = record(
        event("0SEND_F0>1", "", 0, 2, 64), event("0SEND_F1>1", "", 5, 9, 64), event("0SEND_F2>1", "", 0, 1, 8)
    )
    got = record(event("1RECV_F0<0", "", 0, 1, 64), arrivals={parse_action("1RECV_F0<0"): 99 * SECOND})
    assert message_times([sent, got]) == MessageTimes({64: 3.0, 8: 1.0}, {64: 1.0})
