"""Trace files: lossless, the same bytes for the same trace, and valid for Perfetto."""

import json
import math

from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.actions import Action, Kind
from panpipe.core.trace.perfetto import trace_json, write_trace
from panpipe.core.trace.perfetto_reader import read_trace
from panpipe.core.trace.trace import LinkTrack, MemorySample, Trace, TraceEvent
from panpipe.simulators.run import simulate

from ...support.chrome import check_chrome
from ...support.plans import plans
from ...support.traces import two_devices


def records(text: str, phase: str) -> list[dict]:
    return [record for record in json.loads(text)["traceEvents"] if record["ph"] == phase]


times = st.floats(0, 1e4, allow_nan=False).filter(lambda t: t == 0 or t > 1e-12)
actions = st.builds(Action, st.integers(0, 9), st.sampled_from([Kind.F, Kind.B, Kind.I, Kind.W]), st.integers(0, 99))
sends = st.builds(Action, st.integers(0, 9), st.just(Kind.SEND_F), st.integers(0, 99), st.integers(0, 9))
steps = st.builds(Action, st.integers(0, 9), st.sampled_from([Kind.STEP, Kind.REDUCE_TIED]))
events = st.builds(
    lambda device, queue, action, span, size: TraceEvent(device, queue, action, min(span), max(span), size),
    st.integers(0, 3),
    st.sampled_from(["compute", "send to 1", "receive from 2", "copy", 'ünïcode "queue"']),
    actions | sends | steps,
    st.tuples(times, times),
    st.floats(0, 1e12) | st.integers(0, 2**53),
)
samples = st.builds(
    MemorySample, st.integers(0, 3), times, st.sampled_from(["saved", "parameters"]), st.floats(0, 1e12)
)


tracks = st.tuples(st.floats(1, 1e29) | st.just(math.inf), st.lists(st.tuples(times, st.floats(0, 1e12)), max_size=4))


@given(
    st.lists(events, max_size=8).map(tuple),
    st.lists(samples, max_size=8).map(tuple),
    times,
    st.lists(tracks, max_size=3),
)
def test_every_digit_is_kept(tmp_path_factory, found, memory, step_s, tracks):
    links = tuple(
        LinkTrack("a", str(number), limit, tuple(time for time, _ in track), tuple(rate for _, rate in track))
        for number, (limit, track) in enumerate(tracks)
    )
    trace = Trace("measured", "f00", 4, found, memory, step_s, links)
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    write_trace(trace, path)
    assert read_trace(path) == trace
    assert trace_json(read_trace(path)) == path.read_text(encoding="utf-8")


def test_event_has_its_action_in_args():
    (sent,) = [r for r in records(trace_json(two_devices()), "X") if r["name"] == "0SEND_F0>1"]
    assert sent["args"] == {
        "stage": 0,
        "kind": "SEND_F",
        "microbatch": 0,
        "device": 0,
        "queue": "send to 1",
        "peer": 1,
        "bytes": 4096,
    }
    assert (sent["ts"], sent["dur"]) == (100000, 50000)


def test_an_arrow_leads_from_each_send_to_its_receive():
    text = trace_json(two_devices())
    slices = {(r["pid"], r["tid"], r["name"]): r for r in records(text, "X")}
    tails, heads = records(text, "s"), records(text, "f")
    assert [(r["id"], r["ts"]) for r in tails] == [("0:0:0SEND_F0>1", 100000), ("0:1:1SEND_B0>0", 450000)]
    assert [r["id"] for r in heads] == [r["id"] for r in tails]
    for tail, head, name in zip(tails, heads, ("1RECV_F0<0", "0RECV_B0<1"), strict=True):
        receive = slices[head["pid"], head["tid"], name]
        assert tail["ts"] <= head["ts"]
        assert receive["ts"] <= head["ts"] <= receive["ts"] + receive["dur"]


@settings(max_examples=40)
@given(plans(), st.booleans())
def test_a_simulated_step_is_valid_chrome_json(plan, eager):
    check_chrome(json.loads(trace_json(simulate(plan, eager=eager).trace)))
