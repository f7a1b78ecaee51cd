"""The process of long work: its lines, cancelled jobs, progress from standard error, and files."""

import io
import json

import pytest
from panpipe.core.errors import RequestError
from panpipe.explore.worker import Cancelled, Notes, Output, run


def lines(file):
    return [json.loads(line) for line in file.getvalue().splitlines()]


def test_lines_have_the_number_of_their_job():
    file = io.StringIO()
    output = Output(file)
    output.job = 3
    output.write(point=1)
    output.end(error="no")
    assert lines(file) == [{"id": 3, "point": 1}, {"id": 3, "end": True, "error": "no"}]


def test_cancelled_job_ends_at_its_next_line_and_others_go_on():
    file = io.StringIO()
    output = Output(file)
    output.cancel(3)
    output.job = 3
    with pytest.raises(Cancelled):
        output.write(point=1)
    output.end()
    output.job = 4
    output.write(point=2)
    assert lines(file) == [{"id": 3, "end": True}, {"id": 4, "point": 2}]
    assert not issubclass(Cancelled, Exception)  # a search that goes on after errors must not catch it


def test_numbers_that_json_does_not_have_are_an_error():
    with pytest.raises(ValueError, match="JSON"):
        Output(io.StringIO()).write(time=float("inf"))


def test_whole_lines_of_standard_error_are_progress():
    file = io.StringIO()
    notes = Notes(Output(file))
    assert notes.writable()
    for text in ("captur", "ing\n\n  searching\nhalf a", ""):
        assert notes.write(text) == len(text)
    assert [line["progress"]["text"] for line in lines(file)] == ["capturing", "searching"]
    notes.write(" line\n")
    assert lines(file)[-1]["progress"]["text"] == "half a line"


def test_job_reports_its_answer_and_files():
    found = []

    def report(**line):
        found.append(line)

    question = {"kind": "uniform", "devices": 2, "microbatches": 2}
    run(report, "answer", question, "")
    assert [list(line) for line in found] == [["answer"], ["idle"]]
    found.clear()
    run(report, "file", question, "plan")
    (line,) = found
    assert (line["file"]["name"], line["file"]["media_type"]) == ("schedule.csv", "text/csv")
    assert line["file"]["text"].startswith("0F0")


def test_unknown_files_and_jobs_are_refused():
    with pytest.raises(RequestError, match="there is no file 'poem': ask for plan, trace, report or svg"):
        run(lambda **_: None, "file", {"kind": "uniform"}, "poem")
    with pytest.raises(KeyError):
        run(lambda **_: None, "dance", {"kind": "uniform"}, "")
