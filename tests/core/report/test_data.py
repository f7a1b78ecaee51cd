"""Data of the page, from plans and traces by hand."""

import json

import pytest
from attrs import evolve
from panpipe.core.actions import parse_action
from panpipe.core.costs.costs import StageCosts
from panpipe.core.report.data import report_data
from panpipe.core.report.facts import ReportFacts
from panpipe.core.trace.trace import COMPUTE_QUEUE, LinkTrack, MemorySample, Trace, TraceEvent, send_queue

from ...support.plans import orders, plan_of

COSTS = [StageCosts(1.0, 1.0, 1.0, parameter_bytes=40, saved_bytes=100)] * 2
PLAN = plan_of(orders("0F0 0B0", "1F0 1B0"), (0, 1), costs=COSTS)
TIMES = {"0F0": (0, 0.0, 1.0), "1F0": (1, 1.0, 2.0), "1B0": (1, 2.0, 4.0), "0B0": (0, 4.0, 6.0)}


def trace(source="simulated", factor=1.0, **changes):
    events = tuple(
        TraceEvent(device, COMPUTE_QUEUE, parse_action(name), start * factor, end * factor)
        for name, (device, start, end) in TIMES.items()
    )
    memory = (
        MemorySample(0, 0.0, "saved", 0), MemorySample(0, 0.0, "saved", 100), MemorySample(0, 6.0 * factor, "saved", 0),
        MemorySample(1, 1.0 * factor, "saved", 70.4),
    )  # fmt: skip
    return evolve(Trace(source, PLAN.hash, 2, events, memory, 6.0 * factor), **changes)


def data(plan=PLAN, measured=None, predicted=None, **facts):
    found = report_data(plan, predicted or trace(), measured, ReportFacts(**facts))
    json.dumps(found, allow_nan=False)  # the page holds it as JSON
    return found


def test_headline_is_the_fact_or_the_model():
    assert data()["title"] == "test"
    assert data(title="Mine", summary="Two words.")["summary"] == "Two words."
    assert data(evolve(PLAN, model=""))["title"] == "Pipeline plan"
    assert data(None)["title"] == "Predicted and measured"
    assert data()["summary"] == "test in 2 stages on 2 devices, 1 microbatch a step, in the order of by hand."
    replicated = evolve(PLAN, mesh=evolve(PLAN.mesh, data=2), microbatches=3)
    assert ", 2 replicas, 3 microbatches a step" in data(replicated, limits_bytes=(1,) * 4)["summary"]


def test_step_has_both_times_and_the_error_between_them():
    assert data()["step"] == {
        "predicted": 6.0, "measured": None, "error": None, "interval": None, "fastest": None, "slowest": None,
        "timed": 0, "speedup": None,
    }  # fmt: skip
    found = data(measured=trace("measured", 2.0), one_process_step_s=36.0)["step"]
    assert (found["measured"], found["error"], found["speedup"]) == (12.0, -0.5, 3.0)
    timed = data(measured=trace("measured", 2.0), step_times_s=[4.0, 99.0, 5.0], one_process_step_s=10.0)["step"]
    assert (timed["measured"], timed["timed"], timed["speedup"]) == (5.0, 3, 2.0)
    assert (timed["fastest"], timed["slowest"]) == (4.0, 99.0)
    assert data(one_process_step_s=12.0)["step"]["speedup"] == 2.0  # of the prediction, where nothing was measured


def test_both_charts_have_the_queues_of_all_traces():
    sent = TraceEvent(0, send_queue(1), parse_action("0SEND_F0>1"), 1.0, 1.5)
    measured = trace("measured", events=(*trace().events, sent))
    assert data(measured=measured)["queues"] == [[COMPUTE_QUEUE, send_queue(1)], [COMPUTE_QUEUE]]


def test_events_are_columns_and_phases_divide_the_step():
    (found,) = data()["traces"]
    assert found["events"]["kind"] == ["F", "F", "B", "B"]
    assert found["events"]["device"] == [0, 1, 1, 0]
    assert found["events"]["end"] == [1.0, 2.0, 4.0, 6.0]
    assert found["phases"] == [{"warm": 4.0, "cool": 4.0, "end": 6.0}, {"warm": 2.0, "cool": 2.0, "end": 4.0}]
    forward = tuple(event for event in trace().events if event.action.kind.value == "F")
    assert data(predicted=trace(events=forward))["traces"][0]["phases"] == [None, None]


def test_memory_has_the_last_of_several_changes_at_one_time():
    (found,) = data()["traces"]
    assert found["memory"] == {"kinds": ["saved"], "times": [[0.0, 6.0], [1.0]], "held": [[[100], [0]], [[70]]]}
    assert data()["peaks"] == {"kinds": ["saved"], "whole": True, "devices": [[100, pytest.approx(70.4)]]}


def test_peaks_are_of_the_kinds_that_both_traces_have():
    more = (*trace().memory, MemorySample(0, 0.0, "workspace", 7))
    found = data(measured=trace("measured", memory=more))["peaks"]
    assert (found["kinds"], found["whole"]) == (["saved"], False)
    none = data(measured=trace("measured", memory=()))["peaks"]
    assert none["devices"][1] is None
    assert data(predicted=trace(memory=()))["peaks"] == {"kinds": [], "devices": []}


def test_limits_are_given_or_those_of_the_cluster():
    assert data()["limits"] == [10**9, 10**9]
    assert data(limits_bytes=(5, 6))["limits"] == [5, 6]
    assert data(evolve(PLAN, prediction=None))["limits"] == []


def test_links_without_a_limit_and_losses_that_are_no_numbers_have_none():
    links = (LinkTrack("a", "b", float("inf"), (0.0, 1.0), (3.4, 0.0)), LinkTrack("b", "a", 8.0, (0.0,), (8.0,)))
    found = data(predicted=trace(links=links), losses=[1.0, float("nan"), float("inf")])
    assert [(link["name"], link["limit"], link["rates"]) for link in found["links"]] == [
        ("a → b", None, [3, 0]), ("b → a", 8.0, [8]),
    ]  # fmt: skip
    assert found["losses"] == [1.0, None, None]


def test_plan_lists_its_stages_and_what_each_rank_holds():
    found = data(evolve(PLAN, mesh=evolve(PLAN.mesh, data=2)), limits_bytes=(1,) * 4)["plan"]
    assert (found["known"], found["replicas"], found["held"]) == (True, 2, [[0], [1], [0], [1]])
    assert [stage["savedBytes"] for stage in found["stages"]] == [100, 100]
    assert found["edges"] == [{"src": 0, "dst": 1, "bytes": 10, "gradient_bytes": 10}]
    assert data(evolve(PLAN, prediction=None))["plan"]["stages"][0]["forward"] is None


def test_traces_alone_show_the_stages_that_ran():
    found = data(None)["plan"]
    assert (found["known"], found["hash"], found["held"]) == (False, PLAN.hash, [[0], [1]])
    assert found["stages"] == [{"index": 0, "device": 0}, {"index": 1, "device": 1}]
