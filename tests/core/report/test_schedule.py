"""The report of a schedule: its trace, memory in microbatches of one device, messages and copies, by hand."""

import pytest
from panpipe.core.costs.costs import StageCosts
from panpipe.core.report.schedule import schedule_data, schedule_trace
from panpipe.core.schedules.problem import Schedule, ScheduleProblem
from panpipe.core.schedules.registry import find_family
from panpipe.core.schedules.scored import score

from ...support.plans import orders


def scored(name, devices=4, microbatches=6):
    family = find_family(name)
    costs = (StageCosts(5.0, 6.0, 4.0, saved_bytes=1, freed_by_input_bytes=0.25),) * (devices * family.usual_chunks)
    problem = ScheduleProblem(devices, microbatches, family.usual_chunks, costs, 1.0)
    return score(problem, family.build(problem))


def two_devices(hop_s=0.0, limit=None):
    cost = StageCosts(1.0, 1.0, 1.0, saved_bytes=1)
    problem = ScheduleProblem(2, 1, 1, (cost, cost), hop_s, limit)
    return score(problem, Schedule("by-hand", (0, 1), 1, orders("0F0 0B0", "1F0 1B0")))


def test_page_of_a_schedule_has_fractions_of_memory_and_the_evaluation_s_peaks():
    given = scored("v-half")
    data = schedule_data(given)
    held = data["traces"][0]["memory"]["held"]
    peaks = [max(value for (value,) in rows) for rows in held]
    assert peaks == pytest.approx([peak / 2 for peak in given.result.peak_memory])
    assert data["peaks"]["devices"] == [pytest.approx(peaks)]
    assert any(value % 1 for rows in held for (value,) in rows)


def spans(trace):
    return [(event.device, event.queue, str(event.action), event.start_s, event.end_s) for event in trace.events]


def test_trace_has_messages_in_both_directions_where_they_take_time():
    found = [each for each in spans(schedule_trace(two_devices(0.5))) if each[1] != "compute"]
    assert found == [
        (0, "send to 1", "0SEND_F0>1", 1, 1.5), (1, "receive from 0", "1RECV_F0<0", 1, 1.5),
        (0, "receive from 1", "0RECV_B0<1", 4.5, 5.0), (1, "send to 0", "1SEND_B0>0", 4.5, 5.0),
    ]  # fmt: skip


def test_copies_to_the_host_end_when_their_queue_says():
    family = find_family("po-f")
    problem = ScheduleProblem(2, 8, 2, copy_s_per_byte=0.25)
    trace = schedule_trace(score(problem, family.build(problem)))
    copies = [each for each in spans(trace) if each[1] == "host copies"]
    assert copies
    assert {end - start for *_, start, end in copies} == {0.25}
    ends = {}
    for device, _, _, start, end in copies:
        assert start >= ends.get(device, 0.0)
        ends[device] = end
