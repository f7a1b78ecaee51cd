"""``panpipe compare``: what it prints for people, for programs, and on bad input."""

import json

import pytest
from panpipe.cli import main
from panpipe.core.actions import parse_action
from panpipe.core.perfetto import write_trace
from panpipe.core.trace import MemorySample, Trace, TraceEvent


@pytest.fixture
def files(tmp_path):
    """A prediction and a measurement in which B took twice as long."""

    def trace(source: str, backward_s: float) -> Trace:
        events = (
            TraceEvent(0, "compute", parse_action("0F0"), 0.0, 0.001),
            TraceEvent(0, "compute", parse_action("0B0"), 0.001, 0.001 + backward_s),
        )
        return Trace(source, "plan", 1, events, (MemorySample(0, 0.0, "saved", 2e6),), 0.001 + backward_s)

    paths = tmp_path / "predicted.json", tmp_path / "measured.json"
    write_trace(trace("simulated", 0.001), paths[0])
    write_trace(trace("measured", 0.002), paths[1])
    return [str(path) for path in paths]


def test_for_people(files, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    assert main(["compare", *files]) == 0
    out = capsys.readouterr().out
    assert "Step: predicted 2 ms, measured 3 ms, error -33.3%" in out
    backward = next(line for line in out.splitlines() if "0B0" in line)
    assert all(word in backward for word in ("1 ms", "2 ms", "-50.0%", "device 0"))
    assert "2.00 MB" in out
    assert "Order: the same on every queue" in out


def test_for_programs(files, capsys):
    assert main(["compare", *files, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["step"]["error"] == pytest.approx(-1 / 3)
    assert [kind["kind"] for kind in result["kinds"]] == ["F", "B"]
    assert result["kinds"][1]["worst"] == {"device": 0, "action": "0B0"}
    assert [action["action"] for action in result["actions"]] == ["0F0", "0B0"]
    assert result["memory"][0]["peak"] == {"predicted": 2e6, "measured": 2e6, "error": 0.0}


def test_differences_are_named_and_long_lists_cut(files, capsys, tmp_path):
    more = tuple(TraceEvent(0, "compute", parse_action(f"0F{m}"), 1.0 + m, 2.0 + m) for m in range(1, 9))
    turned = (
        TraceEvent(0, "compute", parse_action("0B0"), 0.0, 0.1),
        TraceEvent(0, "compute", parse_action("0F0"), 0.1, 0.2),
    )
    other = tmp_path / "other.json"
    write_trace(Trace("measured", "else", 1, turned + more, (), 9.0), other)
    assert main(["compare", files[0], str(other)]) == 0
    captured = capsys.readouterr()
    assert "different plans" in captured.err
    assert "device 0, compute: 2 positions differ; at 0 0F0 was predicted and 0B0 ran" in captured.out
    assert "Only in the measurement: 8 action(s)" in captured.out
    assert "0F5 on device 0\n  and 3 more: see --json" in captured.out


def test_a_file_that_is_no_trace(files, capsys, tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    assert main(["compare", files[0], str(bad)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "bad.json is not a trace" in captured.err
    assert len(captured.err.splitlines()) == 1
