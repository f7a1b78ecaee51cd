"""Laws of the planner, by the command line and public names.

Plans of random graphs fit, are no slower than any named schedule, and get no worse with more memory or faster links;
and the smallest graphs are planned as fast as any order of theirs.
"""

import importlib
import itertools
import json
import random

import panpipe
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ..support.orders.by_trial import fastest_by_trial

OPERATORS, MICROBATCHES, LATENCY_S = 3, 2, 1e-3


def graph_of(seed, count):
    """A chain of operators with random costs, in milliseconds and megabytes, with an edge that skips some."""
    draw = random.Random(seed)
    nodes = [
        {
            "name": f"n{i}", "forward_s": draw.randint(1, 9) * 1e-3, "backward_input_s": draw.randint(1, 9) * 1e-3,
            "backward_weight_s": draw.randint(0, 9) * 1e-3, "state_bytes": draw.randint(0, 5) * 10**6,
            "saved_bytes": draw.randint(1, 9) * 10**6, "workspace_bytes": draw.randint(0, 5) * 10**6,
        }
        for i in range(count)
    ]  # fmt: skip
    edges = [{"src": f"n{i}", "dst": f"n{i + 1}", "bytes": draw.randint(0, 4) * 10**6} for i in range(count - 1)]
    edges += [{"src": "n0", "dst": f"n{count - 1}", "bytes": 10**6}] if count > 3 else []
    return {"format": "panpipe.opgraph/1", "nodes": nodes, "edges": edges}


def cluster_of(devices, memory_bytes, bytes_per_s):
    """Devices of which every two have a link of their own."""
    pairs = itertools.combinations(range(devices), 2)
    return {
        "format": "panpipe.cluster/1",
        "devices": [{"name": f"d{i}", "memory_bytes": memory_bytes} for i in range(devices)],
        "links": [{"a": f"d{a}", "b": f"d{b}", "bytes_per_s": bytes_per_s, "latency_s": LATENCY_S} for a, b in pairs],
    }


@pytest.fixture
def planned(tmp_path, capsys):
    """A call of ``panpipe plan``: its step in seconds, and the plan; None if nothing fits."""

    def run(graph, cluster, microbatches, *words):
        files = {"graph": graph, "cluster": cluster}
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
        given = [word for name in files for word in (f"--{name}", str(tmp_path / f"{name}.json"))]
        out = tmp_path / "plan.json"
        status = importlib.import_module("panpipe.cli").main(
            ["plan", *given, "--microbatches", str(microbatches), *words, "--out", str(out)]
        )
        capsys.readouterr()
        assert status in (0, 3)
        plan = panpipe.read_plan(out) if status == 0 else None
        return None if plan is None else (plan.predicted.step_s, plan)

    return run


@pytest.mark.parametrize("seed", range(2))
def test_plans_are_no_slower_than_any_named_schedule_and_fit(planned, seed):
    graph, limit = graph_of(seed, 8), 45 * 10**6
    cluster = cluster_of(2, limit, 2e9)
    best, plan = planned(graph, cluster, 6, "--budget", "2000")
    assert max(plan.predicted.peak_memory_bytes) <= limit
    for name in ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "v-half"):
        found = planned(graph, cluster, 6, "--budget", "200", "--schedule", name)
        assert found is None or best <= found[0] * (1 + 1e-9), name


def test_more_memory_and_faster_links_make_no_plan_slower(planned):
    graph = graph_of(0, 8)
    steps = [planned(graph, cluster_of(2, size * 10**6, 2e9), 6, "--budget", "2000") for size in (30, 45, 1000)]
    found = [step[0] for step in steps if step is not None]
    assert len(found) >= 2
    assert steps[-len(found) :] == [step for step in steps if step is not None]  # where less memory suffices, more does
    assert all(more <= less * 1.01 for less, more in itertools.pairwise(found))
    steps = [planned(graph, cluster_of(2, 10**9, rate), 6, "--budget", "2000")[0] for rate in (2e8, 1e10)]
    assert all(more <= less * 1.01 for less, more in itertools.pairwise(steps))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("limit", [10**10, 25 * 10**6])
def test_smallest_graphs_are_planned_as_fast_as_any_order(planned, seed, limit):
    graph, rate = graph_of(seed, OPERATORS), 1e9
    nodes = graph["nodes"]

    def whole(key, unit):  # milliseconds, which a megabyte takes, and megabytes
        return [round(node[key] / unit) for node in nodes]

    times = list(
        zip(*(whole(key, 1e-3) for key in ("forward_s", "backward_input_s", "backward_weight_s")), strict=True)
    )
    saved, workspace, state = (whole(key, 1e6) for key in ("saved_bytes", "workspace_bytes", "state_bytes"))
    least = float("inf")
    for placement in itertools.product((0,), *[(0, 1)] * (OPERATORS - 1)):
        room = [limit / 1e6 - sum(state[i] for i, d in enumerate(placement) if d == at) for at in range(2)]
        edges = []
        for i, edge in enumerate(graph["edges"]):
            delay = (1 + round(edge["bytes"] / 1e6)) if placement[i] != placement[i + 1] else 0
            edges.append((i, i + 1, delay, delay))
        least = min(least, fastest_by_trial(times, placement, edges, saved, workspace, room, MICROBATCHES))
    found = planned(graph, cluster_of(2, limit, rate), MICROBATCHES, "--budget", "20000")
    assert (found is None) == (least == float("inf"))
    assert found is None or found[0] <= least * 1e-3 * 1.005


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 2), st.floats(1, 4), st.floats(0, 2))
def test_searched_schedules_are_no_slower_than_named_ones_within_the_limit(devices, microbatches, chunks, memory, hop):
    limit = memory * chunks
    cost = panpipe.schedules.StageCosts(1, 1.3, 0.8, saved_bytes=1)
    problem = panpipe.schedules.ScheduleProblem(devices, microbatches, chunks, (cost,) * (devices * chunks), hop, limit)
    families = [family for family in panpipe.schedules.families().values() if not family.offloads]
    found = panpipe.schedules.find_schedule([problem], families, evaluations=300)
    assert max(found.result.peak_memory) <= limit * (1 + 1e-9)
    for family in families:
        for parameters in family.candidates_of(problem):
            try:
                named = panpipe.schedules.score(problem, family.build(problem, **parameters)).result
            except panpipe.PanpipeError:
                continue
            if max(named.peak_memory) <= limit:
                assert found.result.makespan <= named.makespan * (1 + 1e-9), family.name
