"""Files that the page offers: their names and types, the same contents as of the commands, and what is refused."""

import json

import pytest
from panpipe.core.errors import RequestError
from panpipe.core.plan.plan import parse_plan
from panpipe.core.report.facts import ReportFacts
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family
from panpipe.core.schedules.scored import score
from panpipe.explore.exports import plan_file, schedule_file
from panpipe.simulators.run import simulate

from ..support.plans import scheduled

PROBLEM = ScheduleProblem(2, 2)
SCORED = score(PROBLEM, find_family("1f1b").build(PROBLEM))
PLAN = scheduled("1f1b", 2, 2)
TYPES = {"trace": ("trace.json", "application/json"), "report": ("report.html", "text/html")}


def test_files_of_a_schedule():
    assert schedule_file(SCORED, "plan").text.splitlines() == ["0F0,0F1,,0B0,,0B1", ",1F0,1B0,1F1,1B1"]
    for what, expected in {**TYPES, "svg": ("schedule.svg", "image/svg+xml")}.items():
        file = schedule_file(SCORED, what)
        assert (file.name, file.media_type) == expected
    assert len(json.loads(schedule_file(SCORED, "trace").text)["traceEvents"]) >= 8


def test_files_of_a_plan_and_its_traces():
    predicted, facts = simulate(PLAN).trace, ReportFacts(title="step", summary="a step")
    assert parse_plan(plan_file(PLAN, predicted, None, facts, "plan").text, "here") == PLAN
    for what, expected in {**TYPES, "svg": ("step.svg", "image/svg+xml")}.items():
        file = plan_file(PLAN, predicted, None, facts, what)
        assert (file.name, file.media_type) == expected
    alone = plan_file(PLAN, predicted, None, facts, "svg").text
    both = plan_file(PLAN, predicted, predicted, facts, "svg").text
    assert alone != both


def test_traces_without_a_plan_have_no_plan_file():
    predicted, facts = simulate(PLAN).trace, ReportFacts(title="step", summary="a step")
    with pytest.raises(RequestError, match="these traces have no plan: open it together with them"):
        plan_file(None, predicted, None, facts, "plan")
    assert "<title>step</title>" in plan_file(None, predicted, None, facts, "svg").text


@pytest.mark.parametrize("what", ["", "PLAN", "pdf"])
def test_other_files_are_refused(what):
    for ask in (lambda: schedule_file(SCORED, what), lambda: plan_file(PLAN, None, None, None, what)):
        with pytest.raises(RequestError, match=f"there is no file '{what}': ask for plan, trace, report or svg"):
            ask()
