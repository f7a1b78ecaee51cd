"""Exceptions that end a process, and how they are printed."""

import sys

from panpipe.core.errors import RequestError, WorkerError
from panpipe.runtimes.watch import process
from panpipe.runtimes.watch.process import print_uncaught_in_a_line


def test_uncaught_worker_error_is_printed_in_one_line_and_others_as_before(capsys, monkeypatch):
    monkeypatch.setattr(process, "_printed", [])
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *failure: seen.append(failure[1]))
    print_uncaught_in_a_line(3)
    print_uncaught_in_a_line(3)
    mine, other = WorkerError("rank 2 stopped answering"), ValueError("own")
    for failure in (mine, other):
        sys.excepthook(type(failure), failure, None)
    assert capsys.readouterr().err == "panpipe: rank 2 stopped answering; rank 3 stops too\n"
    assert seen == [other]


def failure_in_a_user_file(tmp_path):
    """An error that panpipe raises where a script calls it, with its traceback."""
    script = tmp_path / "train.py"
    script.write_text("from panpipe.core.plan.plan import read_plan\n\nread_plan('none.json')\n")
    try:
        exec(compile(script.read_text(), str(script), "exec"), {})
    except RequestError as error:
        return script, error, error.__traceback__.tb_next  # without the frame of this test
    raise AssertionError("none.json was read")


def test_request_error_is_one_line_with_the_line_that_called_panpipe(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(process, "_printed", [])
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *failure: seen.append(failure[1]))
    print_uncaught_in_a_line(1)
    script, error, trace = failure_in_a_user_file(tmp_path)
    sys.excepthook(type(error), error, trace)
    assert capsys.readouterr().err == f"panpipe: rank 1: {script}:3: {error}\n"
    assert seen == []
    monkeypatch.setenv("PANPIPE_TRACEBACK", "1")
    sys.excepthook(type(error), error, trace)
    assert seen == [error]
