"""Results that the explorer opens: plans with their traces, traces alone, and files that are none."""

import json

import pytest
from attrs import evolve
from panpipe.core.errors import RequestError
from panpipe.core.plan.plan import plan_json
from panpipe.core.trace.perfetto import write_trace
from panpipe.explore.results import open_results
from panpipe.simulators.run import simulate

from ..support.plans import scheduled


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A plan, its simulated and a measured trace, and another plan, as files."""
    folder = tmp_path_factory.mktemp("results")
    plan, other = scheduled("1f1b", 2, 4), scheduled("gpipe", 2, 4)
    trace = simulate(plan).trace
    (folder / "plan.json").write_text(plan_json(plan), encoding="utf-8")
    (folder / "other.json").write_text(plan_json(other), encoding="utf-8")
    write_trace(trace, folder / "predicted.json")
    write_trace(evolve(trace, source="measured", step_s=1.1 * trace.step_s), folder / "measured.json")
    return folder


def test_plan_with_its_measured_trace_is_compared(files):
    results = open_results([files / "plan.json", files / "measured.json"])
    assert results.titles == ["plan.json + measured.json"]
    report = results.answer(0)["report"]
    assert [trace["name"] for trace in report["traces"]] == ["predicted", "measured"]
    assert report["comparison"]["same_plan"]
    assert report["idle"]["step_s"] > 0
    assert report["plan"]["stages"][0]["names"]
    assert results.file(0, "report").text.startswith("<!doctype html>")
    assert results.file(0, "svg").text.startswith("<svg")


def test_plans_are_a_list_and_traces_alone_are_compared(files):
    assert open_results([files / "plan.json", files / "other.json"]).titles == ["plan.json", "other.json"]
    both = open_results([files / "predicted.json", files / "measured.json"])
    assert both.titles == ["predicted.json + measured.json"]
    assert both.answer(0)["report"]["comparison"] is not None


def test_wrong_files_are_refused_in_one_line(files, tmp_path):
    newer = json.loads((files / "plan.json").read_text(encoding="utf-8")) | {"format": "panpipe.plan/2"}
    (tmp_path / "newer.json").write_text(json.dumps(newer), encoding="utf-8")
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    for names, words in (
        ([tmp_path / "newer.json"], "is of format 'panpipe.plan/2'; this panpipe reads version 1"),
        ([tmp_path / "broken.json"], "is not a whole JSON file"),
        ([tmp_path / "none.json"], "cannot read"),
        ([files / "other.json", files / "measured.json"], "is of another plan than those given"),
    ):
        with pytest.raises(RequestError, match=words):
            open_results(names)
    with pytest.raises(RequestError, match="there is no result 1"):
        open_results([files / "plan.json"]).answer(1)
