"""``panpipe simulate``: what it prints for people, for programs, what it writes, and bad input."""

import json

import attrs
import pytest
from attrs import evolve
from panpipe.cli import main
from panpipe.core.actions import Kind
from panpipe.core.cluster.catalog import find_cluster
from panpipe.core.cluster.cluster import cluster_json, fully_connected
from panpipe.core.lowering.derive import forward_only
from panpipe.core.plan.plan import MemoryPolicy, plan_json
from panpipe.core.trace.perfetto_reader import read_trace
from panpipe.simulators.run import simulate

from ..support.browser import Page
from ..support.chrome import check_chrome
from ..support.plans import hosted, leaves, scheduled

PLAN = scheduled("1f1b", 2, 4, cluster=fully_connected(2, 10**9, 100.0, 0.5))

COSTS = PLAN.prediction.costs, PLAN.prediction.cluster


@pytest.fixture
def plan_file(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(plan_json(PLAN), encoding="utf-8")
    return str(path)


def test_simulate_prints_step_bubbles_links_and_memory(plan_file, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    assert main(["simulate", plan_file]) == 0
    out = capsys.readouterr().out
    result = simulate(PLAN)
    assert (
        f"step {result.step_s:.3g} s, stage span {result.stage_span_s:.3g} s, bubble {result.bubble_ratio:.1%}" in out
    )
    assert all(word in out for word in ("warm-up", "comm", "work", "device0 → device1", "Why not faster"))
    assert "Memory at each device's peak, in bytes" in out
    assert "1000000000" in out


def test_an_action_is_not_broken_in_a_narrow_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    costs = tuple(evolve(cost, saved_bytes=10**10, workspace_bytes=10**10) for cost in PLAN.prediction.costs)
    prediction = evolve(PLAN.prediction, costs=costs, cluster=fully_connected(2, 10**12, 100.0, 0.5))
    plan = evolve(PLAN, prediction=prediction, memory=MemoryPolicy(recompute=(0, 1)))
    path = tmp_path / "plan.json"
    path.write_text(plan_json(plan), encoding="utf-8")
    assert main(["simulate", str(path)]) == 0
    out = capsys.readouterr().out
    for action in simulate(plan).peak_actions:
        assert action.kind.value == "RECOMPUTE"
        assert str(action) in out


def test_simulate_json_has_the_simulated_figures(plan_file, capsys):
    assert main(["simulate", plan_file, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    result = simulate(PLAN)
    assert answer["step_s"] == result.step_s
    assert answer["peak_memory_bytes"] == list(result.peak_memory_bytes)
    assert answer["bubbles_s"] == list(result.bubbles)
    assert answer["peak_actions"] == [str(action) for action in result.peak_actions]
    assert [link["bytes"] for link in answer["links"]] == [40.0, 40.0]
    assert [sum(held.values()) for held in answer["memory_at_peak_bytes"]] == answer["peak_memory_bytes"]
    idle = answer["idle"]
    assert sum(cause["seconds"] for cause in idle["causes"]) == pytest.approx(idle["step_s"] - idle["compute_s"])
    assert idle["compute_s"] == pytest.approx(sum(answer["busy_s"]) / 2)


def test_trace_and_report_have_links_and_idle_causes(plan_file, tmp_path, capsys):
    trace, report = tmp_path / "trace.json", tmp_path / "report.html"
    assert main(["simulate", plan_file, "--trace", str(trace), "--report", str(report)]) == 0
    found = read_trace(trace)
    assert [(link.src, link.dst, link.bytes_per_s) for link in found.links] == [
        ("device0", "device1", 100.0),
        ("device1", "device0", 100.0),
    ]
    check_chrome(json.loads(trace.read_text(encoding="utf-8")))
    data = Page(report.read_text(encoding="utf-8")).data
    assert [link["name"] for link in data["links"]] == ["device0 → device1", "device1 → device0"]
    assert data["idle"]["step_s"] == simulate(PLAN).step_s
    assert main(["compare", str(trace), str(trace)]) == 0
    assert "error 0.0%" in capsys.readouterr().out


def test_plan_for_more_devices_than_the_cluster_is_refused(tmp_path, capsys):
    small = attrs.evolve(PLAN.prediction, cluster=fully_connected(1, 10**9, 100.0, 0.5))
    path = tmp_path / "plan.json"
    path.write_text(plan_json(attrs.evolve(PLAN, prediction=small)), encoding="utf-8")
    assert main(["simulate", str(path)]) == 2
    assert "needs 2 devices and the cluster has 1" in capsys.readouterr().err


def test_plan_that_exceeds_memory_is_reported_and_simulated(tmp_path, capsys):
    path = tmp_path / "plan.json"
    path.write_text(plan_json(scheduled("1f1b", 2, 4, cluster=fully_connected(2, 150, 100.0, 0.5))), encoding="utf-8")
    assert main(["simulate", str(path), "--json"]) == 0
    captured = capsys.readouterr()
    assert "does not fit: device 0 holds 207 bytes at 0F1 and has 150" in captured.err
    assert json.loads(captured.out)["peak_saved_bytes"][0] == 200


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a whole JSON file"),
        (plan_json(attrs.evolve(PLAN, prediction=None)), "holds no costs"),
        (plan_json(PLAN).replace('"panpipe.plan/1"', '"panpipe.plan/2"'), "this panpipe reads version 1"),
        (plan_json(PLAN).replace('"0F3"', '"0F2"'), "0F2 is listed twice"),
    ],
)
def test_wrong_plans_are_refused(text, message, tmp_path, capsys):
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="utf-8")
    assert main(["simulate", str(path)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1


def test_a_schedule_file_runs_with_equal_stages(tmp_path, capsys):
    path, report = tmp_path / "orders.csv", tmp_path / "report.html"
    assert main(["schedule", "zb-v", "--devices", "3", "--microbatches", "5", "--csv", str(path), "--json"]) == 0
    makespan = json.loads(capsys.readouterr().out)["makespan"]
    assert main(["simulate", str(path), "--report", str(report), "--json"]) == 0
    held = Page(report.read_text(encoding="utf-8")).data["traces"][0]["memory"]["held"]
    assert any(value == 0.5 for rows in held for (value,) in rows)  # one of the two stages of a device
    answer = json.loads(capsys.readouterr().out)
    assert answer["step_s"] == makespan
    assert answer["busy_s"] == [15.0] * 3
    assert main(["simulate", str(path), "--comm", "0.5", "--forward", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] > makespan + 5


def test_stage_span_depends_on_the_optimizer_barrier(tmp_path, capsys):
    path = tmp_path / "orders.csv"
    assert main(["schedule", "zb-h2", "--devices", "3", "--microbatches", "6", "--csv", str(path), "--json"]) == 0
    spans = {}
    capsys.readouterr()
    for mode in ("local", "barrier", "post-validation"):
        assert main(["simulate", str(path), "--optimizer", mode, "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        spans[mode] = answer["stage_span_s"]
    assert spans["local"] == spans["post-validation"] == 18.0  # a parallelogram: no device idles
    assert spans["barrier"] == 20.0  # the first device has nothing to do until the last is done


def test_times_with_a_plan_are_refused(plan_file, capsys):
    assert main(["simulate", plan_file, "--forward", "2"]) == 2
    assert "--forward is for schedule files" in capsys.readouterr().err


def test_a_plan_runs_on_another_cluster(plan_file, capsys):
    assert main(["simulate", plan_file, "--cluster", "2xL40S", "--json"]) == 0
    moved = json.loads(capsys.readouterr().out)
    assert moved["step_s"] == simulate(PLAN, cluster=find_cluster("2xL40S")).step_s < simulate(PLAN).step_s
    assert {link["src"] for link in moved["links"]} == {"gpu0", "gpu1", "pcie0", "host0", "memory of host0"}


def test_cluster_that_does_not_fit_the_plan_is_refused(plan_file, tmp_path, capsys):
    assert main(["simulate", plan_file, "--cluster", "H100"]) == 2
    assert "device" in capsys.readouterr().err
    csv = tmp_path / "order.csv"
    csv.write_text("0F0,0B0\n", encoding="utf-8")
    assert main(["simulate", str(csv), "--cluster", "H100"]) == 2
    assert "--cluster is for plans" in capsys.readouterr().err


def test_simulated_evaluation_has_only_forwards(plan_file, tmp_path, capsys):
    trace, report = tmp_path / "trace.json", tmp_path / "report.html"
    assert main(["simulate", plan_file, "--forward-only", "--trace", str(trace), "--report", str(report)]) == 0
    out = capsys.readouterr().out
    assert f"forwards {simulate(forward_only(PLAN), *COSTS).step_s:.3g} s" in out
    found = read_trace(trace)
    assert found.plan_hash == forward_only(PLAN).hash != PLAN.hash
    assert {event.action.kind for event in found.events} == {Kind.F, Kind.SEND_F, Kind.RECV_F}
    check_chrome(json.loads(trace.read_text(encoding="utf-8")))
    assert "<html" in report.read_text(encoding="utf-8")
    assert main(["simulate", plan_file, "--forward-only", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["step_s"] == found.step_s < simulate(PLAN).step_s
    assert answer["peak_saved_bytes"] == [0.0, 0.0]


def test_schedule_file_without_forwards_is_refused_by_its_name(tmp_path, capsys):
    path = tmp_path / "order.csv"
    path.write_text("0B0,0B0\n1B0\n", encoding="utf-8")
    assert main(["simulate", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"panpipe: {path}: 0B0 is listed twice")


def test_simulated_evaluation_has_no_optimizer_step(plan_file, capsys):
    assert main(["simulate", plan_file, "--forward-only", "--optimizer", "barrier"]) == 2
    assert "--optimizer is barrier with --forward-only: an evaluation has no optimizer step" in capsys.readouterr().err


def test_simulate_prints_the_copies_and_host_memory_of_a_plan_that_offloads(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    cluster = hosted(fully_connected(2, 10**9, 100.0, 0.0), 100.0)
    plan = scheduled("1f1b", 2, 4, cluster=cluster, offload=[leaves(0, 80, "1: 0B0 0B0")])
    path, trace, report = tmp_path / "plan.json", tmp_path / "trace.json", tmp_path / "report.html"
    path.write_text(plan_json(plan), encoding="utf-8")
    assert main(["simulate", str(path), "--trace", str(trace), "--report", str(report)]) == 0
    out = capsys.readouterr().out
    for word in ("Offloaded tensors in host memory", "0 from host", "100 B/s", "stay on the device"):
        assert word in out
    assert [str(e.action) for e in read_trace(trace).events if e.queue == "host copies"] == ["0OFFLOAD1", "0RELOAD1"]
    page = report.read_text(encoding="utf-8")
    assert '"hosts":[{"name":"host","limit":null,"arena":128}]' in page
    assert '"kept":[{"stage":0,"microbatches":1,"bytes":20' in page
    assert main(["simulate", str(path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["hosts"] == [
        {"host": "host", "devices": [0], "limit_bytes": None, "arena_bytes": 128, "peak_bytes": 80}
    ]
    assert [(use["direction"], use["seconds"]) for use in answer["host_copies"]] == [
        ("from host", pytest.approx(0.8)), ("to host", pytest.approx(0.8))
    ]  # fmt: skip
    assert [use["cause"] for use in answer["idle"]["causes"] if use["cause"] == "host copies"] == ["host copies"]


def test_host_that_is_too_small_is_refused_without_an_answer(tmp_path, capsys):
    cluster = hosted(fully_connected(2, 10**9, 100.0, 0.0), 100.0)
    plan = scheduled("1f1b", 2, 4, cluster=cluster, offload=[leaves(0, 80, "1: 0B0 0B0")])
    path, other, trace = tmp_path / "plan.json", tmp_path / "cluster.json", tmp_path / "trace.json"
    path.write_text(plan_json(plan), encoding="utf-8")
    small = evolve(cluster, hubs=tuple(evolve(hub, memory_bytes=127) for hub in cluster.hubs if hub.kind == "host"))
    other.write_text(cluster_json(small), encoding="utf-8")
    assert main(["simulate", str(path), "--cluster", str(other), "--trace", str(trace)]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "host 'host' holds 128 bytes of offloaded tensors of device 0 and has 127: 1 too many" in captured.err
    assert captured.err.count("\n") == 1
    assert not trace.exists()


@pytest.mark.parametrize("option", ["--forward", "--backward-input", "--backward-weight", "--comm"])
def test_seconds_of_a_schedule_file_above_a_year_are_refused(tmp_path, capsys, option):
    path = tmp_path / "orders.csv"
    assert main(["schedule", "gpipe", "--devices", "2", "--microbatches", "2", "--csv", str(path), "--json"]) == 0
    capsys.readouterr()
    assert main(["simulate", str(path), option, "4e7"]) == 2
    assert f"{option} is 4e+07 s, more than a year: give seconds" in capsys.readouterr().err


def test_schedule_file_is_simulated_without_invented_limits_and_rates(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    path, report = tmp_path / "schedule.csv", tmp_path / "report.html"
    words = ["schedule", "zb-v", "--devices", "2", "--microbatches", "4"]
    assert main([*words, "--json"]) == 0
    scheduled_ = json.loads(capsys.readouterr().out)
    assert main([*words, "--csv", str(path)]) == 0
    assert "%" in capsys.readouterr().out.split("idle share")[1].splitlines()[2]
    assert main(["simulate", str(path), "--report", str(report)]) == 0
    out, err = capsys.readouterr()
    data = Page(report.read_text(encoding="utf-8")).data
    assert data["peaks"]["devices"] == [scheduled_["peak_memory"]]
    assert (data["units"], data["limits"]) == ("plain", [])
    assert "inf" not in out
    assert "used" not in out
    assert "does not fit" not in err
    assert "cool-down" in out  # whole words: only causes that occur have a column
    assert "contention" not in out
