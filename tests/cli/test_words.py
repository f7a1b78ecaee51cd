"""The words of the command line: names of searched schedules, advice for models that need no pipeline, completion."""

import json
import os
import subprocess
import sys

import pytest
from attrs import evolve
from panpipe.answers.plan.answer import data_parallel_advice
from panpipe.cli import main
from panpipe.core.plan.plan import read_plan
from panpipe.core.schedules.meaning import meaning_of

GRAPH = {
    "format": "panpipe.opgraph/1",
    "nodes": [
        {"name": f"layer{i}", "forward_s": 1e-3, "backward_input_s": 1e-3, "backward_weight_s": 1e-3, "optimizer_s": 0,
         "parameter_bytes": 100, "state_bytes": 400, "saved_bytes": 50, "workspace_bytes": 10}
        for i in range(4)
    ],
    "edges": [{"src": f"layer{i}", "dst": f"layer{i + 1}", "bytes": 8} for i in range(3)],
}  # fmt: skip


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    cluster = {
        "format": "panpipe.cluster/1", "hubs": ["switch"],
        "devices": [{"name": f"d{i}", "memory_bytes": 10_000, "type": None} for i in range(2)],
        "links": [{"a": f"d{i}", "b": "switch", "bytes_per_s": 1e9, "latency_s": 1e-6} for i in range(2)],
    }  # fmt: skip
    for name, content in (("graph", GRAPH), ("cluster", cluster)):
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    options = ["--graph", str(folder / "graph.json"), "--cluster", str(folder / "cluster.json"), "--schedule", "1f1b"]
    assert main(["plan", *options, "--microbatches", "4", "--out", str(folder / "plan.json")]) == 0
    return read_plan(folder / "plan.json")


def test_a_plan_of_what_fits_one_device_says_so(plan):
    need = 4 * 400 + 4 * 50 + 10
    assert data_parallel_advice(plan, (need, need)) == (
        "this fits on one device, one microbatch at a time: use DDP over 2 devices if the batch allows it"
    )
    assert data_parallel_advice(plan, (need - 1, need)) is None


def test_a_plan_that_recomputes_is_not_said_to_fit_one_device(plan):
    saving = evolve(plan, memory=evolve(plan.memory, recompute=(0,)))
    assert data_parallel_advice(saving, (1e9, 1e9)) is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("listed", "not from a published schedule"),
        ("auto(listed)", "improved by moves"),
        ("auto(zb-v)", "derived from zb-v, whose own order is slower here or needs more memory"),
        ("auto(looped(loops=2,run_ahead=[3,2]))", "derived from looped"),
        ("auto(evaluations=100,seed=0)", "budget and seed"),
    ],
)
def test_names_of_searched_schedules_have_a_meaning(name, words):
    assert words in meaning_of(name)


def test_published_schedules_need_no_explanation():
    assert meaning_of("1f1b") is None


def test_forward_scales_both_halves_of_the_backward_unless_they_are_given(capsys):
    def makespan(*options):
        assert main(["schedule", "1f1b", "--devices", "2", "--microbatches", "4", "--json", *options]) == 0
        return json.loads(capsys.readouterr().out)["makespan"]

    whole = makespan()
    assert makespan("--forward", "10") == pytest.approx(10 * whole)
    assert makespan("--forward", "10", "--backward-input", "1", "--backward-weight", "1") < 10 * whole


def test_shells_complete_commands_and_options():
    def completed(*words):
        given = {"_PANPIPE_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
        command = [sys.executable, "-m", "panpipe"]
        return subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True, check=True).stdout

    assert completed("panpipe", "sche").split() == ["schedule", "schedules"]
    assert completed("panpipe", "schedules", "--mic").split() == ["--microbatches"]
