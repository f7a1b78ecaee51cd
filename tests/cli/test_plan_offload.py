"""``panpipe plan --offload``: what is printed, what is refused, and what an infeasible request suggests."""

import json

import pytest
from panpipe import cli
from panpipe.core.cluster.cluster import cluster_json
from panpipe.core.costs.graph import graph_json
from panpipe.core.plan.plan import read_plan
from panpipe.core.validation.validate import validate

from ..support.offload_clusters import SAVED, cluster_with_hosts, uniform_graph

LIMIT = (4 << 20) * 2 + (1 << 20) + 3 * SAVED
"""A device's two layers and three of their saved tensors: 1F1B holds eight."""


@pytest.fixture
def request_of(tmp_path, capsys):
    """Runs the command for eight layers on four devices; a function of further words → (status, output, errors)."""
    graph, cluster = tmp_path / "graph.json", tmp_path / "cluster.json"
    graph.write_text(graph_json(uniform_graph(8, 0.5)), encoding="utf-8")
    cluster.write_text(cluster_json(cluster_with_hosts(4)), encoding="utf-8")

    def run(*words):
        fixed = ("plan", "--graph", graph, "--cluster", cluster, "--microbatches", 8, "--budget", 120)
        status = cli.main([*map(str, fixed), *map(str, words)])
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.mark.slow
def test_auto_offloads_where_memory_is_short(request_of, tmp_path):
    out = tmp_path / "plan.json"
    status, text, _ = request_of("--memory-limit", LIMIT, "--offload", "auto", "--json", "--out", out)
    found = json.loads(text)
    assert status == 0
    assert max(found["peak_memory_bytes"]) <= LIMIT
    assert found["offload"]
    assert all(each["microbatches"] <= 8 and each["bytes"] >= 1_000_000 for each in found["offload"])
    plan = read_plan(out)
    validate(plan)
    assert [each.stage for each in plan.memory.offload] == [each["stage"] for each in found["offload"]]


def test_text_names_what_leaves(request_of):
    _, text, _ = request_of("--schedule", "po-f")
    assert "Offload: " in text
    assert "of saved tensors a step to the host and back, of stages 0 1 2 3" in text


def test_nothing_is_printed_where_nothing_leaves(request_of):
    status, text, _ = request_of("--schedule", "1f1b", "--offload", "auto", "--json")
    assert status == 0
    assert "offload" not in json.loads(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--offload", "most"), "offload is 'most': give none, all, auto, or the share of each stage"),
        (("--offload", "0:2"), "offload of stage 0 is 2.0: give a share from 0 to 1"),
        (("--offload", "70:1", "--schedule", "1f1b"), "offload names stage 70, and the plan has stages 0 to 3"),
        (("--host-memory", "-1"), "--host-memory is '-1': give bytes, at least 0"),
    ],
)
def test_wrong_options_are_refused(request_of, words, message):
    status, _, err = request_of(*words)
    assert status == 2
    assert message in err


def test_host_with_too_little_memory_is_infeasible(request_of):
    status, _, err = request_of("--schedule", "1f1b", "--offload", "all", "--host-memory", SAVED)
    assert status == 3
    assert "host 'host0' holds" in err
    assert "bytes more, or keep stage" in err


def test_infeasible_suggests_offload_and_the_suggestion_fits(request_of):
    words = ("--schedule", "gpipe", "--memory-limit", LIMIT + 3 * SAVED)
    status, text, err = request_of(*words, "--json")
    assert status == 3
    (change,) = [each for each in json.loads(text)["changes"] if each["change"] == "offload"]
    assert change["bytes"] > 0
    assert "--offload auto: " in err
    status, text, _ = request_of(*words, "--offload", "auto", "--json")
    assert status == 0
    assert json.loads(text)["predicted_step_s"] <= change["step_s"] * (1 + 1e-9)


@pytest.mark.parametrize("schedule", ["po-h", "po-f"])
def test_auto_takes_the_orders_of_a_schedule_that_offloads_and_copies_only_what_does_not_fit(request_of, schedule):
    words = ("--schedule", schedule, "--offload", "auto", "--json")
    status, text, _ = request_of(*words)
    assert status == 0
    fits = json.loads(text)
    assert "offload" not in fits
    limit = int(max(fits["peak_memory_bytes"]) * 0.8)
    status, text, _ = request_of(*words, "--memory-limit", limit)
    found = json.loads(text)
    assert status == 0
    assert found["offload"]
    assert found["schedule"].startswith(schedule)
    assert max(found["peak_memory_bytes"]) <= limit
