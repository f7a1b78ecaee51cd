"""Answers on uniform stages: the schedule, why it does not fit, and the points of time against memory."""

import pytest
from panpipe.core.errors import InfeasibleError
from panpipe.core.report.schedule import schedule_data
from panpipe.core.schedules.registry import find_family
from panpipe.explore import uniform_answers
from panpipe.explore.question import UniformQuestion
from panpipe.explore.uniform_answers import answer, report_points, scored_of, why_not_faster

SMALL = UniformQuestion(devices=2, microbatches=4)


@pytest.fixture(autouse=True)
def forgotten():
    uniform_answers._built.cache_clear()


def reports(function, question):
    found = []
    function(question, lambda **data: found.append(data))
    return found


def test_answer_has_the_figures_of_the_schedule():
    found = answer(SMALL, *scored_of(SMALL))
    # 4 microbatches of 3 units, and 3 units in which the pipeline fills and drains
    figures = {"makespan": 15.0, "bubble_ratio": 0.2, "stage_span_bubble_ratio": 0.2, "peak_memory": 2.0}
    assert {name: found["figures"][name] for name in figures} == pytest.approx(figures)
    assert (found["misfit"], found["command"]) == ("", "panpipe schedule 1f1b --devices 2 --microbatches 4")
    assert found["report"] == schedule_data(scored_of(SMALL)[0])


def test_request_that_no_memory_is_enough_for_has_its_first_reason(monkeypatch):
    limits = []

    def refused(name, stages, given, limited=True):
        limits.append(limited)
        raise InfeasibleError(f"nothing fits in {stages.memory_limit if limited else None}")

    monkeypatch.setattr(uniform_answers, "build_schedule", refused)
    with pytest.raises(InfeasibleError, match=r"nothing fits in 2\.0"):
        scored_of(UniformQuestion(memory_limit=2.0))
    assert limits == [True, False]


def test_idle_time_is_divided_by_cause():
    found = why_not_faster(scored_of(UniformQuestion(devices=2, microbatches=4, comm=0.5))[0])
    assert (found["step_s"], found["compute_s"]) == (17.0, 12.0)
    causes = {each["cause"]: each["seconds"] for each in found["causes"] if each["seconds"]}
    assert causes == {"fill and drain": 3.0, "messages": 2.0}


def test_points_are_the_schedules_that_no_other_excels_and_what_auto_finds(monkeypatch):
    searched, found_by_auto = [], scored_of(UniformQuestion(schedule="zb-h1", devices=2, microbatches=4))

    def search(asked):
        searched.append((asked.schedule, asked.memory_limit, asked.parameters))
        return found_by_auto

    known = [find_family(name) for name in ("gpipe", "looped", "1f1b")]
    monkeypatch.setattr(uniform_answers, "resident_families", lambda: known)
    monkeypatch.setattr(uniform_answers, "scored_of", search)
    found = reports(report_points, UniformQuestion(devices=2, microbatches=4, chunks=1, memory_limit=3.0))
    assert [data["progress"] for data in found if "progress" in data] == [
        {"text": "gpipe", "done": 0, "of": 3},
        {"text": "looped", "done": 1, "of": 3},
        {"text": "1f1b", "done": 2, "of": 3},
        {"text": "auto, at most 2", "done": 0, "of": 2},
        {"text": "auto, at most 3", "done": 1, "of": 2},
    ]
    points = [data["point"] for data in found if "point" in data]
    # gpipe holds 4; both searches return the same schedule, which differs from all named ones
    assert [(each["family"], each["memory"], each["time"]) for each in points] == [
        ("looped", 2.0, 15.0), ("1f1b", 2.0, 15.0), ("auto", 2.0, 13.0), ("auto", 2.0, 13.0),
    ]  # fmt: skip
    assert points[0]["question"]["parameters"] == {"microbatches_per_loop": 2, "run_ahead": (2, 1)}
    assert points[1]["question"] == {
        "kind": "uniform", "devices": 2, "microbatches": 4, "chunks": 1, "memory_limit": 3.0,
    }  # fmt: skip
    assert searched == [("auto", limit, {"evaluations": uniform_answers.ORDERS_TO_TRY}) for limit in (2.0, 3.0)]
