"""Trace files: lossless both ways, the same bytes each time, and what Perfetto needs to draw them."""

import json
import math

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.actions import Action, Kind, parse_action
from panpipe.core.errors import RequestError
from panpipe.core.trace.perfetto import read_trace, trace_json, write_trace, write_traces
from panpipe.core.trace.trace import LinkTrack, MemorySample, Trace, TraceEvent
from panpipe.simulators.run import simulate

from ...support.chrome import check_chrome
from ...support.plans import plans


def event(device: int, queue: str, text: str, span_s: tuple[float, float], size: float = 0) -> TraceEvent:
    return TraceEvent(device, queue, parse_action(text), *span_s, size)


def two_devices(source: str = "simulated") -> Trace:
    """One microbatch through two stages, forward and back."""
    return Trace(
        source,
        "abc123",
        2,
        (
            event(0, "compute", "0F0", (0.0, 0.1)),
            event(1, "receive from 0", "1RECV_F0<0", (0.0, 0.15), 4096),
            event(0, "send to 1", "0SEND_F0>1", (0.1, 0.15), 4096),
            event(0, "receive from 1", "0RECV_B0<1", (0.1, 0.5), 4096),
            event(1, "compute", "1F0", (0.15, 0.25)),
            event(1, "compute", "1B0", (0.25, 0.45)),
            event(1, "send to 0", "1SEND_B0>0", (0.45, 0.5), 4096),
            event(0, "compute", "0B0", (0.5, 0.7000000001)),
            event(0, "compute", "0STEP", (0.7000000001, 0.75)),
        ),
        (
            MemorySample(0, 0.0, "parameters", 1e9),
            MemorySample(0, 0.1, "saved", 2.5),
            MemorySample(1, 0.25, "saved", 7),
        ),
        0.75,
        (
            LinkTrack("gpu0", "gpu1", 1e5, (0.1, 0.15), (81920.0, 0.0)),
            LinkTrack("gpu1", "gpu0", math.inf, (), ()),
        ),
    )


def records(text: str, phase: str) -> list[dict]:
    return [record for record in json.loads(text)["traceEvents"] if record["ph"] == phase]


def test_a_written_trace_is_read_back_whole(tmp_path):
    write_trace(two_devices(), tmp_path / "trace.json")
    assert read_trace(tmp_path / "trace.json") == two_devices()


def test_the_reference_workload_s_time_is_written_where_it_is_known(tmp_path):
    assert "reference_s" not in trace_json({"": two_devices()})
    write_trace(evolve(two_devices(), reference_s=0.0125), tmp_path / "trace.json")
    assert read_trace(tmp_path / "trace.json").reference_s == 0.0125


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


tracks = st.tuples(st.floats(1, math.inf), st.lists(st.tuples(times, st.floats(0, 1e12)), max_size=4))


@given(
    st.lists(events, max_size=8).map(tuple),
    st.lists(samples, max_size=8).map(tuple),
    times,
    st.lists(tracks, max_size=3),
)
def test_every_digit_survives(tmp_path_factory, found, memory, step_s, tracks):
    links = tuple(
        LinkTrack("a", str(number), limit, tuple(time for time, _ in track), tuple(rate for _, rate in track))
        for number, (limit, track) in enumerate(tracks)
    )
    trace = Trace("measured", "f00", 4, found, memory, step_s, links)
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    write_trace(trace, path)
    assert read_trace(path) == trace
    assert trace_json({"": read_trace(path)}) == path.read_text(encoding="utf-8")


def test_prediction_and_measurement_have_the_same_tracks():
    texts = [trace_json({"": two_devices(source)}) for source in ("simulated", "measured")]
    names = [[r["args"]["name"] for r in records(text, "M") if r["name"] == "thread_name"] for text in texts]
    assert names[0] == names[1] == ["compute", "receive from 1", "send to 1", "compute", "receive from 0", "send to 0"]
    processes = [r["args"]["name"] for r in records(texts[0], "M") if r["name"] == "process_name"]
    assert processes == ["device 0", "device 1", "links"]


def test_an_event_says_what_it_is():
    (sent,) = [r for r in records(trace_json({"": two_devices()}), "X") if r["name"] == "0SEND_F0>1"]
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
    text = trace_json({"": two_devices()})
    slices = {(r["pid"], r["tid"], r["name"]): r for r in records(text, "X")}
    tails, heads = records(text, "s"), records(text, "f")
    assert [(r["id"], r["ts"]) for r in tails] == [("0:0:0SEND_F0>1", 100000), ("0:1:1SEND_B0>0", 450000)]
    assert [r["id"] for r in heads] == [r["id"] for r in tails]
    for tail, head, name in zip(tails, heads, ("1RECV_F0<0", "0RECV_B0<1"), strict=True):
        receive = slices[head["pid"], head["tid"], name]
        assert tail["ts"] <= head["ts"]
        assert receive["ts"] <= head["ts"] <= receive["ts"] + receive["dur"]


def test_a_counter_for_each_kind_of_memory():
    counters = [r for r in records(trace_json({"": two_devices()}), "C") if r["name"] == "memory"]
    assert [(r["pid"], r["ts"], r["args"]) for r in counters] == [
        (0, 0, {"parameters": 1000000000}),
        (0, 100000, {"saved": 2.5}),
        (1, 250000, {"saved": 7}),
    ]


def test_a_counter_for_each_direction_of_a_link():
    text = trace_json({"": two_devices()})
    (process,) = [r["pid"] for r in records(text, "M") if r["args"].get("name") == "links"]
    counters = [r for r in records(text, "C") if r["pid"] == process]
    assert [(r["name"], r["ts"], r["args"]) for r in counters] == [
        ("gpu0 → gpu1", 100000, {"bytes_per_s": 81920}),
        ("gpu0 → gpu1", 150000, {"bytes_per_s": 0}),
    ]


def test_messages_that_overlap_stand_on_threads_of_their_own():
    first, second = (event(0, "send to 1", f"0SEND_F{m}>1", (m / 10, m / 10 + 0.15)) for m in range(2))
    third = event(0, "send to 1", "0SEND_F2>1", (0.2, 0.3))
    text = trace_json({"": Trace("simulated", "", 2, (first, second, third), (), 0.3)})
    names = {r["tid"]: r["args"]["name"] for r in records(text, "M") if r["name"] == "thread_name"}
    assert [names[r["tid"]] for r in records(text, "X")] == ["send to 1", "send to 1 · 2", "send to 1"]


@settings(max_examples=40)
@given(plans(), st.booleans())
def test_a_simulated_step_is_valid_chrome_json(plan, eager):
    check_chrome(json.loads(trace_json({"": simulate(plan, eager=eager).trace})))


def test_two_traces_in_one_file_stand_side_by_side(tmp_path):
    path = tmp_path / "both.json"
    write_traces({"predicted": two_devices(), "measured": two_devices("measured")}, path)
    found = records(path.read_text(encoding="utf-8"), "M")
    names = {r["pid"]: r["args"]["name"] for r in found if r["name"] == "process_name"}
    assert names == {
        0: "device 0 · predicted",
        1: "device 0 · measured",
        2: "device 1 · predicted",
        3: "device 1 · measured",
        4: "links · predicted",
        5: "links · measured",
    }
    with pytest.raises(RequestError, match="holds 2 traces"):
        read_trace(path)


def test_chrome_json_from_elsewhere_is_read_where_it_says_enough(tmp_path):
    path = tmp_path / "foreign.json"
    args = {"stage": 1, "kind": "F", "microbatch": 2, "device": 1}
    foreign = [{"ph": "X", "ts": 5, "dur": 2.5, "pid": 7, "args": args}, {"ph": "X", "ts": 0, "dur": 1, "name": "idle"}]
    path.write_text(json.dumps(foreign), encoding="utf-8")
    expected = (TraceEvent(1, "compute", Action(1, Kind.F, 2), 5e-6, 7.5e-6, 0),)
    assert read_trace(path) == Trace("measured", "", 2, expected, (), 7.5e-6)


def good() -> dict:
    return json.loads(trace_json({"": two_devices()}))


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
        (broken(lambda d: d["otherData"]["traces"][0].update(step_s=-1)), "its step takes -1"),
        (broken(lambda d: d["otherData"]["traces"][0].update(devices=1)), "names device 1"),
        (broken(lambda d: d["otherData"]["traces"][0].update(links=[])), "counts bytes of link gpu0 → gpu1"),
        (broken(lambda d: d["otherData"]["traces"][0].update(links=[3])), "is not one of panpipe.trace/1"),
        (broken(lambda d: first_event(d).update(dur=-1)), "lasts -1"),
        (broken(lambda d: first_event(d).pop("ts")), "has no 'ts'"),
        (broken(lambda d: first_event(d).update(ts=math.nan)), "NaN is no number"),
        (broken(lambda d: first_event(d).update(ts="soon")), "is not an action"),
        (broken(lambda d: first_event(d)["args"].update(kind="X")), "is not a valid Kind"),
        (broken(lambda d: first_event(d)["args"].update(stage=-1)), "-1 is no number"),
        (broken(lambda d: first_event(d)["args"].update(device=True)), "True is no number"),
        (broken(lambda d: first_event(d)["args"].update(microbatch=None)), "F has microbatch None"),
        (broken(lambda d: first_event(d)["args"].pop("stage")), "has no 'stage'"),
        (broken(lambda d: first_event(d).update(args=3)), "is not an action"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path, text, message):
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RequestError, match=message) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(RequestError, match="cannot read"):
        read_trace(tmp_path / "none.json")
