"""Reports too large for a browser: what is left out, and that the page says so."""

import json

import pytest
from panpipe.core.actions import Action, Kind
from panpipe.core.report.data import report_data
from panpipe.core.report.facts import ReportFacts
from panpipe.core.report.page import SAMPLES, reduced_data
from panpipe.core.trace.trace import LinkTrack, MemorySample, Trace, TraceEvent, receive_queue, send_queue

DEVICES, COUNT = 8, 400


def data(samples=50, rates=50):
    """A step of 8 devices with messages, memory and a link; the highest sample is the one at two thirds."""
    events = []
    for device in range(DEVICES):
        for m in range(COUNT):
            events.append(TraceEvent(device, "compute", Action(device, Kind.F, m), m, m + 0.5))
            if device + 1 < DEVICES:
                send = Action(device, Kind.SEND_F, m, device + 1)
                events.append(TraceEvent(device, send_queue(device + 1), send, m + 0.5, m + 0.6, 8))
                events.append(TraceEvent(device + 1, receive_queue(device), send.counterpart, m + 0.5, m + 0.6, 8))
    highest = 2 * samples // 3
    memory = [
        MemorySample(device, i / samples, "saved", 10**6 if i == highest else i % 7)
        for i in range(samples)
        for device in range(DEVICES)
    ]
    link = LinkTrack("a", "b", 1e9, tuple(i / rates for i in range(rates)), tuple(float(i % 5) for i in range(rates)))
    trace = Trace("simulated", "", DEVICES, tuple(events), tuple(memory), float(COUNT), (link,))
    return report_data(None, trace, None, ReportFacts(notes=("mine",)))


def size(found):
    return len(json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode())


def test_data_that_fits_is_left_as_it_is():
    found = data()
    assert reduced_data(found, size(found)) is found
    assert found["notes"] == ["mine"]


def test_memory_and_rates_are_reduced_first_and_keep_their_highest_values():
    found = data(samples=3 * SAMPLES, rates=3 * SAMPLES)
    before = json.dumps(found)
    less = reduced_data(found, int(1.2 * size(data(SAMPLES, SAMPLES))))
    assert json.dumps(found) == before  # the data itself is unchanged
    assert all(len(held) == SAMPLES for held in less["traces"][0]["memory"]["held"])
    assert max(held[0] for held in less["traces"][0]["memory"]["held"][3]) == 10**6
    assert (len(less["links"][0]["rates"]), max(less["links"][0]["rates"])) == (SAMPLES, 4)
    assert less["traces"][0]["events"] == found["traces"][0]["events"]
    assert less["peaks"] == found["peaks"]
    assert "samples" in less["notes"][0]
    assert less["notes"][1] == "mine"


@pytest.mark.parametrize("share", [0.6, 0.2])
def test_messages_and_then_devices_are_removed_and_the_page_notes_it(share):
    found = data()
    less = reduced_data(found, int(share * size(found)))
    assert size(less) <= share * size(found) + 1000  # the note itself
    events = less["traces"][0]["events"]
    assert set(events["kind"]) == {"F"}
    assert all(queues == ["compute"] for queues in less["queues"])
    assert "no messages between devices" in less["notes"][0]
    assert less["notes"][0].startswith(f"With everything this page has {size(found) / 1e6:.0f} MB of data")
    if share < 0.5:
        assert 1 <= len(set(events["device"])) < DEVICES
        assert f"of {DEVICES} devices" in less["notes"][0]
