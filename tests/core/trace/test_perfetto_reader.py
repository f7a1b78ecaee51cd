"""Reading trace files: foreign Chrome JSON is read, wrong files are refused with the reason."""

import json
import math

import pytest
from panpipe.core.actions import Action, Kind
from panpipe.core.errors import RequestError
from panpipe.core.trace.perfetto import trace_json
from panpipe.core.trace.perfetto_reader import read_trace
from panpipe.core.trace.trace import Trace, TraceEvent

from ...support.traces import two_devices


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
