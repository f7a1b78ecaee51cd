"""``panpipe compare``: what it prints for people, for programs, and on bad input."""

import json

import pytest
from attrs import evolve
from panpipe.cli import main
from panpipe.core.actions import parse_action
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.plan.plan import plan_json
from panpipe.core.trace.compare import TOTAL, peak_memory
from panpipe.core.trace.perfetto import write_trace
from panpipe.core.trace.trace import MemorySample, Trace, TraceEvent
from panpipe.simulators.run import simulate

from ..support.browser import Page
from ..support.plans import hosted, leaves, orders, plan_of, scheduled


@pytest.fixture
def files(tmp_path):
    """A prediction and a measurement in which B took twice as long, and F differs by a rounding error."""

    def trace(source: str, backward_s: float) -> Trace:
        events = (
            TraceEvent(0, "compute", parse_action("0F0"), 0.0, 0.001 + 1e-15 * backward_s),
            TraceEvent(0, "compute", parse_action("0B0"), 0.001, 0.001 + backward_s),
        )
        return Trace(source, "plan", 1, events, (MemorySample(0, 0.0, "saved", 2e6),), 0.001 + backward_s)

    paths = tmp_path / "predicted.json", tmp_path / "measured.json"
    write_trace(trace("simulated", 0.001), paths[0])
    write_trace(trace("measured", 0.002), paths[1])
    return [str(path) for path in paths]


def test_compare_prints_step_kinds_and_order(files, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    assert main(["compare", *files]) == 0
    out = capsys.readouterr().out
    assert "Step: predicted 2 ms, measured 3 ms, error -33.3%" in out
    backward = next(line for line in out.splitlines() if "0B0" in line)
    assert all(word in backward for word in ("1 ms", "2 ms", "-50.0%"))
    assert "2.00 MB" in out
    assert "e-1" not in out
    assert "Order: the same on every queue" in out


def test_compare_json_has_every_action(files, capsys):
    assert main(["compare", *files, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["step"]["error"] == pytest.approx(-1 / 3)
    assert [kind["kind"] for kind in result["kinds"]] == ["F", "B"]
    assert result["kinds"][1]["worst"] == {"device": 0, "action": "0B0"}
    assert [action["action"] for action in result["actions"]] == ["0F0", "0B0"]
    assert result["memory"][0]["peak"] == {"predicted": 2e6, "measured": 2e6, "error": 0.0}


def test_compare_report_has_the_predicted_plan(tmp_path, capsys):
    plan = scheduled("1f1b", 2, 4)
    write_trace(simulate(plan).trace, tmp_path / "trace.json")
    for name, shown in (("plan", plan), ("other", scheduled("gpipe", 2, 4))):
        (tmp_path / f"{name}.json").write_text(plan_json(shown), encoding="utf-8")
    report = tmp_path / "report.html"
    both = ["compare", str(tmp_path / "trace.json"), str(tmp_path / "trace.json")]
    assert main([*both, "--plan", str(tmp_path / "plan.json"), "--report", str(report)]) == 0
    assert Page(report.read_text(encoding="utf-8")).data["plan"]["known"]
    assert main([*both, "--plan", str(tmp_path / "other.json"), "--report", str(report)]) == 2
    assert "trace.json is of another plan than" in capsys.readouterr().err
    assert main([*both, "--plan", str(tmp_path / "plan.json")]) == 2
    assert "also give --report FILE.html" in capsys.readouterr().err


BAD = {
    "no such trace": (lambda folder: folder / "none.json", "none.json': No such file or directory"),
    "a folder": (lambda folder: folder, "Is a directory"),
    "no JSON": (lambda folder: _file(folder, "{"), "is not a whole JSON file"),
    "a plan": (lambda folder: _file(folder, plan_json(scheduled("gpipe", 1, 1))), "is not a trace"),
    "not text": (lambda folder: _file(folder, b"\xff\xfe"), "not UTF-8 text"),
}


def _file(folder, content):
    path = folder / "bad.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD)
def test_bad_traces_are_one_line_and_status_2(files, capsys, tmp_path, make, message):
    for arguments in ([files[0], str(make(tmp_path))], [str(make(tmp_path)), files[1]]):
        assert main(["compare", *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert message in captured.err
        assert captured.err.count("\n") == 1


def test_compare_names_differences_and_shortens_long_lists(files, capsys, tmp_path):
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
    assert "Only in the measurement: 8 actions" in captured.out
    assert "0F5 on device 0\n  and 3 more: see --json" in captured.out


def test_file_without_a_trace_is_refused(files, capsys, tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text("{}", encoding="utf-8")
    assert main(["compare", files[0], str(bad)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "bad.json is not a trace" in captured.err
    assert len(captured.err.splitlines()) == 1


def test_plan_whose_device_has_no_host_is_named(tmp_path, capsys):
    cluster = hosted(fully_connected(1, 10**9, 1e9, 0.0), 1e9)
    plan = plan_of(orders("0F0 0F1 0F2 0B0 0B1 0B2"), (0,), cluster=cluster, offload=(leaves(0, 50, "1: 0F2 0B0"),))
    trace, file, report = (str(tmp_path / name) for name in ("trace.json", "plan.json", "report.html"))
    write_trace(simulate(plan).trace, trace)
    without = evolve(cluster, hubs=(), links=tuple(link for link in cluster.links if "host" not in (link.a, link.b)))
    evolve(plan, prediction=evolve(plan.prediction, cluster=without)).save(file)
    assert main(["compare", trace, trace, "--plan", file, "--report", report]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"panpipe: {file}: device 0 ")
    assert "reaches no hub of kind host" in line


def test_samples_at_one_time_count_together():
    moved = [MemorySample(0, 1.0, kind, size) for kind, size in (("saved", 5.0), ("workspace", 5.0), ("saved", 0.0))]
    (peak,) = peak_memory(Trace("simulator", "plan", 1, (), tuple(moved), 1.0), ("saved", "workspace"))
    assert peak == {"saved": 0.0, "workspace": 5.0, TOTAL: 5.0}
