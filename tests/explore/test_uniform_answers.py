"""Answers on uniform stages: the schedule, why it does not fit, and the points of time against memory."""

import pytest
from attrs import evolve
from panpipe.core.errors import InfeasibleError, RequestError
from panpipe.core.report.schedule import schedule_data
from panpipe.core.schedules.registry import find_family
from panpipe.core.schedules.scored import costs_of
from panpipe.core.timing.orders import evaluate
from panpipe.explore import uniform_answers
from panpipe.explore.question import UniformQuestion
from panpipe.explore.uniform_answers import (
    answer,
    file_of,
    idle_of,
    report_answer,
    report_points,
    scored_of,
    stages_of,
)

SMALL = UniformQuestion(devices=2, microbatches=4)


@pytest.fixture(autouse=True)
def forgotten():
    uniform_answers._built.cache_clear()


def reports(function, question):
    found = []
    function(question, lambda **data: found.append(data))
    return found


def test_stages_have_the_numbers_of_the_question():
    asked = UniformQuestion(devices=3, microbatches=5, forward=2.0, backward_weight=4.0, comm=0.5, host_copy=7.0)
    found = stages_of(asked)
    assert (found.devices, found.microbatches, found.comm, found.host_copy) == (3, 5, 0.5, 7.0)
    assert (found.device.forward_s, found.device.backward_input_s, found.device.backward_weight_s) == (2.0, 1.0, 4.0)


def test_answer_has_the_figures_of_the_schedule():
    found = answer(SMALL, *scored_of(SMALL))
    # 4 microbatches of 3 units, and 3 units in which the pipeline fills and drains
    figures = {"makespan": 15.0, "bubble_ratio": 0.2, "stage_span_bubble_ratio": 0.2, "peak_memory": 2.0}
    assert found["figures"] == pytest.approx(figures)
    assert (found["misfit"], found["command"]) == ("", "panpipe schedule 1f1b --devices 2 --microbatches 4")
    assert found["report"] == schedule_data(scored_of(SMALL)[0])


def test_equal_questions_are_answered_once():
    first = scored_of(SMALL)
    assert scored_of(UniformQuestion(devices=2, microbatches=4, comm=0.0)) is first
    assert scored_of(UniformQuestion(devices=2, microbatches=4, comm=0.5)) is not first


def test_schedule_that_does_not_fit_is_built_without_the_limit():
    scored, misfit = scored_of(UniformQuestion(schedule="gpipe", devices=2, microbatches=4, chunks=1, memory_limit=2.0))
    assert misfit.startswith("gpipe holds 4 on device 0 at 0F3, 2 over the limit of 2: raise --memory-limit to 4")
    assert (scored.problem.memory_limit, scored.result.peak_memory) == (2.0, (4.0, 4.0))


def test_request_that_no_memory_is_enough_for_has_its_first_reason(monkeypatch):
    limits = []

    def refused(name, stages, chunks, given, limit):
        limits.append(limit)
        raise InfeasibleError(f"nothing fits in {limit}")

    monkeypatch.setattr(uniform_answers, "build_schedule", refused)
    with pytest.raises(InfeasibleError, match=r"nothing fits in 2\.0"):
        scored_of(UniformQuestion(memory_limit=2.0))
    assert limits == [2.0, None]


def test_unknown_schedules_and_parameters_are_refused():
    with pytest.raises(RequestError, match="nothing"):
        scored_of(UniformQuestion(schedule="nothing"))
    with pytest.raises(RequestError, match="--rounds is no parameter of 1f1b"):
        scored_of(UniformQuestion(parameters={"rounds": 2}))


def test_idle_time_is_divided_by_cause():
    found = idle_of(scored_of(UniformQuestion(devices=2, microbatches=4, comm=0.5))[0])
    assert (found.step_s, found.compute_s) == (17.0, 12.0)
    causes = {name: seconds for name, seconds in found.causes.items() if seconds}
    assert causes == {"fill and drain": 3.0, "messages": 2.0}


def test_copies_that_delay_the_step_are_a_cause_of_idle_time():
    planned = scored_of(UniformQuestion(schedule="po-f", devices=2, microbatches=4, host_copy=0.5))[0]
    copies = [[copy._replace(out_s=4.0) for copy in own] for own in planned.copies]
    schedule = planned.schedule
    result = evaluate(schedule.device_actions, schedule.placement, costs_of(planned.problem), copies=copies)
    delay = result.makespan - planned.result.makespan
    assert delay > 0
    before, delayed = idle_of(planned).causes, idle_of(evolve(planned, copies=copies, result=result)).causes
    assert delayed == pytest.approx({**before, "host copies": delay})


def test_answer_is_reported_before_its_idle_time():
    answered, idle = reports(report_answer, SMALL)
    assert answered["answer"]["figures"]["makespan"] == 15.0
    assert (idle["idle"]["step"], idle["idle"]["causes"][0]["seconds"]) == (15.0, 3.0)


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
    assert points[0]["question"]["parameters"] == {"microbatches_per_loop": 2, "run_ahead": [2, 1]}
    assert points[1]["question"] == {
        "kind": "uniform", "devices": 2, "microbatches": 4, "chunks": 1, "memory_limit": 3.0,
    }  # fmt: skip
    assert searched == [("auto", limit, {"evaluations": uniform_answers.ORDERS_TO_TRY}) for limit in (2.0, 3.0)]


def test_schedule_that_auto_finds_among_the_named_ones_is_one_point(monkeypatch):
    plain = scored_of(SMALL)
    monkeypatch.setattr(uniform_answers, "resident_families", lambda: [find_family("1f1b")])
    monkeypatch.setattr(uniform_answers, "scored_of", lambda asked: plain)
    points = [data["point"]["family"] for data in reports(report_points, SMALL) if "point" in data]
    assert points == ["1f1b"]


def test_limit_within_which_auto_finds_nothing_has_no_point(monkeypatch):
    auto, _ = scored_of(UniformQuestion(schedule="zb-h1", devices=2, microbatches=4))
    monkeypatch.setattr(uniform_answers, "resident_families", lambda: [find_family("1f1b")])
    monkeypatch.setattr(uniform_answers, "scored_of", lambda asked: (auto, "nothing fits"))
    points = [data["point"]["family"] for data in reports(report_points, SMALL) if "point" in data]
    assert points == ["1f1b"]


def test_file_is_that_of_the_schedule():
    found = file_of(SMALL, "plan", lambda **data: None)
    assert (found.name, found.text.splitlines()[1]) == ("schedule.csv", ",1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3")
    with pytest.raises(RequestError, match="there is no file 'csv': ask for plan, trace, report or svg"):
        file_of(SMALL, "csv", lambda **data: None)
