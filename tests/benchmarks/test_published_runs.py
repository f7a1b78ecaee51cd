"""Published runs: their configurations, and that ``panpipe plan`` predicts one of each kind."""

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "published"


@pytest.fixture(scope="module")
def runs():
    pytest.importorskip("transformers")
    before = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("published_runs")
    sys.path[:] = before  # the script has added the root


@pytest.mark.parametrize(
    "name", ["GPT 22B, full recomputation", pytest.param("MPT 7b on 8 H100", marks=pytest.mark.slow)]
)
def test_run_on_one_node_is_predicted_within_25_percent(runs, name):
    found = runs.planned(next(run for run in runs.RUNS if run.name == name))
    assert found.answer is not None, found.said
    assert abs(found.error) < 0.25


def test_at_most_half_of_the_runs_of_each_device_are_fitted(runs):
    assert len({run.name for run in runs.RUNS}) == len(runs.RUNS) >= 20
    for device in ("A100", "H100"):
        fitted = [run.fitted for run in runs.RUNS if device in run.cluster.split("x")[-1]]
        assert 0 < sum(fitted) <= (len(fitted) + 1) / 2


def test_report_has_a_row_for_each_run_and_the_summary_of_each_group(runs):
    good = runs.Outcome(
        runs.RUNS[0], {"predicted_step_s": 1.1 * runs.RUNS[0].step_s, "peak_memory_bytes": [1]}, "", 1.0
    )
    refused = runs.Outcome(runs.RUNS[1], None, "nothing fits", 2.0)
    rows, lines = runs.tables([good, refused])
    assert [row[6] for row in rows] == ["+10.0%", "+inf%"]
    assert rows[1][5] == "nothing fits"
    assert lines[0] == ["all", "2", "median inf%, worst inf%"]
