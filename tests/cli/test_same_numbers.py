"""One plan has the same step, bubble, efficiency and peaks in every command, in its report and in the explorer."""

import json
import re
import shlex

import pytest
from panpipe.cli import main
from panpipe.explore import plan_answers
from panpipe.explore.question import parse_question

FORWARD_S = 1e-3
SAVED_BYTES = 50


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A graph whose stages are equal, and a cluster whose messages take no time worth mentioning."""
    folder = tmp_path_factory.mktemp("numbers")
    graph = {
        "format": "panpipe.opgraph/1",
        "nodes": [
            {"name": f"layer{i}", "forward_s": FORWARD_S, "backward_input_s": FORWARD_S, "backward_weight_s": FORWARD_S,
             "optimizer_s": 0, "parameter_bytes": 100, "state_bytes": 400, "saved_bytes": SAVED_BYTES,
             "workspace_bytes": 10}
            for i in range(4)
        ],
        "edges": [{"src": f"layer{i}", "dst": f"layer{i + 1}", "bytes": 8} for i in range(3)],
    }  # fmt: skip
    cluster = {
        "format": "panpipe.cluster/1", "hubs": ["switch"],
        "devices": [{"name": f"d{i}", "memory_bytes": 10_000, "type": None} for i in range(2)],
        "links": [{"a": f"d{i}", "b": "switch", "bytes_per_s": 1e15, "latency_s": 1e-12} for i in range(2)],
    }  # fmt: skip
    for name, content in (("graph", graph), ("cluster", cluster)):
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def question(folder):
    return {
        "kind": "plan", "graph": str(folder / "graph.json"), "cluster": str(folder / "cluster.json"),
        "schedule": "1f1b", "microbatches": 4, "mesh": "pp=2",
    }  # fmt: skip


def test_numbers_of_a_plan_are_the_same_everywhere(folder, question, capsys):
    def answer(*words):
        assert main([*map(str, words), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    plan, trace, report = folder / "plan.json", folder / "trace.json", folder / "report.html"
    command = shlex.split(parse_question(question).command)
    planned_ = answer(*command[1:], "--out", plan)
    simulated = answer("simulate", plan, "--trace", trace, "--report", report)
    validated = answer("validate", plan)
    compared = answer("compare", trace, trace)
    drawn = json.loads(re.search('id="data">(.*?)</script>', report.read_text(encoding="utf-8"))[1])
    lines = []
    plan_answers.report_answer(parse_question(question), lambda **line: lines.append(line))
    explored = next(line["answer"] for line in lines if "answer" in line)

    step, bubble, peaks = (simulated[name] for name in ("step_s", "bubble_ratio", "peak_memory_bytes"))
    assert planned_["simulated_step_s"] == explored["figures"]["simulated_step_s"] == step
    assert drawn["step"]["predicted"] == explored["report"]["step"]["predicted"] == step
    assert compared["step"]["predicted"] == compared["step"]["measured"] == step
    assert planned_["idle"]["step_s"] == simulated["idle"]["step_s"] == pytest.approx(step)
    assert drawn["traces"][0]["bubbles"] == explored["report"]["traces"][0]["bubbles"]
    assert min(drawn["traces"][0]["bubbles"]) == pytest.approx(bubble)
    assert min(device["predicted"] for device in compared["bubbles"]) == pytest.approx(bubble)
    assert bubble == pytest.approx(1 - max(simulated["busy_s"]) / step)
    assert planned_["efficiency"] == explored["figures"]["efficiency"]
    assert planned_["efficiency"] == pytest.approx(sum(simulated["busy_s"]) / (2 * step))
    assert planned_["simulated_peak_memory_bytes"] == validated["peak_memory_bytes"] == peaks
    assert explored["figures"]["simulated_peak_memory_bytes"] == peaks
    assert drawn["peaks"]["devices"] == explored["report"]["peaks"]["devices"] == [peaks]
    totals = [row["peak"]["predicted"] for row in compared["memory"] if row["kind"] == "total"]
    assert totals == peaks
    assert validated["peak_saved_bytes"] == simulated["peak_saved_bytes"]


def test_schedule_of_equal_stages_has_the_numbers_of_its_plan(folder, question, capsys):
    command = shlex.split(parse_question(question).command)
    assert main([*command[1:], "--out", str(folder / "equal.json"), "--json"]) == 0
    capsys.readouterr()
    assert main(["schedule", "1f1b", "--devices", "2", "--microbatches", "4", "--json"]) == 0
    schedule = json.loads(capsys.readouterr().out)
    assert main(["simulate", str(folder / "equal.json"), "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    stage_s, stage_bytes = 2 * FORWARD_S, 2 * SAVED_BYTES
    assert simulated["step_s"] == pytest.approx(schedule["makespan"] * stage_s)
    assert simulated["bubble_ratio"] == pytest.approx(schedule["bubble_ratio"])
    assert simulated["peak_saved_bytes"] == pytest.approx([peak * stage_bytes for peak in schedule["peak_memory"]])
