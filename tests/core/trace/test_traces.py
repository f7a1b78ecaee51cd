"""Trace files: lossless, valid for Perfetto, read or refused with the reason; and compared, with errors by hand."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.actions import Action, Kind, parse_action
from panpipe.core.errors import RequestError
from panpipe.core.trace.compare import ActionOnDevice, Pair, compare
from panpipe.core.trace.perfetto import trace_json, write_trace
from panpipe.core.trace.perfetto_reader import read_trace
from panpipe.core.trace.trace import LinkTrack, MemorySample, Trace, TraceEvent
from panpipe.simulators.run import simulate

from ...support.chrome import check_chrome
from ...support.plans import plans
from ...support.traces import two_devices

# Trace files: lossless, the same bytes for the same trace, and valid for Perfetto.


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


# Reading trace files: foreign Chrome JSON is read, wrong files are refused with the reason.


def test_chrome_json_of_another_program_is_read_if_its_events_have_actions(tmp_path):
    path = tmp_path / "foreign.json"
    args = {"stage": 1, "kind": "F", "microbatch": 2, "device": 1}
    foreign = [{"ph": "X", "ts": 5, "dur": 2.5, "pid": 7, "args": args}, {"ph": "X", "ts": 0, "dur": 1, "name": "idle"}]
    path.write_text(json.dumps(foreign), encoding="utf-8")
    expected = (TraceEvent(1, "compute", Action(1, Kind.F, 2), 5e-6, 7.5e-6, 0),)
    assert read_trace(path) == Trace("measured", "", 2, expected, (), 7.5e-6)


def good() -> dict:
    return json.loads(trace_json(two_devices()))


def first_event(data: dict) -> dict:
    return next(record for record in data["traceEvents"] if record["ph"] == "X")


def broken(change) -> str:
    data = good()
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a whole JSON file"),
        ("3", "is not a trace"),
        ('{"traceEvents": 3}', "is not a trace"),
        ('{"traceEvents": [3]}', "is not a trace"),
        ("[]", "holds no action"),
        (broken(lambda d: d["otherData"].update(format="panpipe.trace/2")), "is of format 'panpipe.trace/2'"),
        (broken(lambda d: d["otherData"]["traces"].append({})), "holds 2 traces"),
        (broken(lambda d: d["otherData"]["traces"][0].pop("step_s")), "has no 'step_s'"),
        (broken(lambda d: d["otherData"]["traces"][0].update(step_s=-1)), "takes -1.0 s"),
        (broken(lambda d: d["otherData"]["traces"][0].update(devices=1)), "names device 1"),
        (broken(lambda d: d["otherData"]["traces"][0].update(links=[])), "has rates of link gpu0 → gpu1"),
        (broken(lambda d: d["otherData"]["traces"][0].update(links=[3])), "is not one of panpipe.trace/1"),
        (broken(lambda d: first_event(d).update(dur=-1)), "lasts -1"),
        (broken(lambda d: first_event(d).pop("ts")), "has no 'ts'"),
        (broken(lambda d: first_event(d).update(ts=math.nan)), "nan is not a number"),
        (broken(lambda d: first_event(d).update(ts="soon")), "is not an action"),
        (broken(lambda d: first_event(d)["args"].update(kind="X")), "is not a valid Kind"),
        (broken(lambda d: first_event(d)["args"].update(stage=-1)), "-1 is not a whole number"),
        (broken(lambda d: first_event(d)["args"].update(device=True)), "True is not a whole number"),
        (broken(lambda d: first_event(d)["args"].update(microbatch=None)), "F has microbatch None"),
        (broken(lambda d: first_event(d)["args"].pop("stage")), "has no 'stage'"),
        (broken(lambda d: first_event(d).update(args=3)), "is not an action"),
    ],
)
def test_bad_file_is_refused_with_its_name_and_the_reason(tmp_path, text, message):
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RequestError, match=message) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)


# Comparisons of a predicted and a measured trace, with errors computed by hand.


def compute(text: str, start_s: float, end_s: float, device: int = 0) -> TraceEvent:
    return TraceEvent(device, "compute", parse_action(text), start_s, end_s)


PREDICTED = Trace(
    "simulated",
    "plan",
    2,
    (
        compute("0F0", 0.0, 1.0),
        compute("0F1", 1.0, 2.0),
        compute("1F0", 1.0, 3.0, device=1),
        compute("0B0", 3.0, 5.0),
        compute("0STEP", 5.0, 6.0),
    ),
    (MemorySample(0, 0.0, "saved", 0), MemorySample(0, 1.0, "saved", 110), MemorySample(1, 0.0, "parameters", 50)),
    6.0,
)
MEASURED = Trace(
    "measured",
    "plan",
    2,
    (
        compute("0F1", 0.0, 1.0),
        compute("0F0", 1.0, 3.0),
        compute("1F0", 1.0, 3.0, device=1),
        compute("0B0", 3.0, 4.6),
        compute("1B0", 4.6, 5.0, device=1),
    ),
    (MemorySample(0, 0.5, "saved", 100), MemorySample(0, 1.0, "saved", 40)),
    5.0,
)


def test_each_action_is_compared_with_the_same_action():
    rows = {str(a.action): a for a in compare(PREDICTED, MEASURED).actions}
    assert list(rows) == ["0F0", "0F1", "1F0", "0B0"]
    assert rows["0F0"].start == Pair(0.0, 1.0, -1.0)
    assert rows["0F0"].duration == Pair(1.0, 2.0, -0.5)
    assert rows["0B0"].duration.error == pytest.approx(0.25)
    assert rows["0B0"].end == Pair(5.0, 4.6, pytest.approx(5 / 4.6 - 1))
    assert rows["0F1"].start == Pair(1.0, 0.0, None)


def test_summary_of_a_kind_has_bias_median_and_worst_error():
    forward, backward = compare(PREDICTED, MEASURED).kinds
    assert (forward.kind, forward.count) == (Kind.F, 3)
    assert (forward.predicted_s, forward.measured_s, forward.bias) == (4.0, 5.0, pytest.approx(-0.2))
    assert forward.median_error == 0.0
    assert forward.mean_error == pytest.approx(0.5 / 3)
    assert forward.worst_error == -0.5
    assert forward.worst == ActionOnDevice(0, parse_action("0F0"))
    assert (backward.kind, backward.bias) == (Kind.B, pytest.approx(0.25))


@given(st.lists(st.tuples(st.floats(0.01, 10), st.floats(0.01, 10)), min_size=1, max_size=20), st.floats(0.1, 10))
def test_slowed_copy_of_a_trace_has_the_same_error_everywhere(spans, factor):
    def trace(scale: float) -> Trace:
        events, now = [], 0.0
        for microbatch, (gap, length) in enumerate(spans):
            events.append(compute(f"0F{microbatch}", scale * (now + gap), scale * (now + gap + length)))
            now += gap + length
        return Trace("simulated", "plan", 1, tuple(events), (), scale * now)

    result = compare(trace(factor), trace(1.0))
    assert result.order == result.only_predicted == result.only_measured == ()
    assert result.step.error == pytest.approx(factor - 1, abs=1e-6)
    assert result.kinds[0].bias == pytest.approx(factor - 1, abs=1e-6)
    assert [a.duration.error for a in result.actions] == pytest.approx([factor - 1] * len(spans), abs=1e-6)
    assert result.bubbles[0].predicted == pytest.approx(result.bubbles[0].measured, abs=1e-6)
