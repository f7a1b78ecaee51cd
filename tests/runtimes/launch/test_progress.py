"""Progress of planning: to whom it is show_progress, and how."""

import re
import sys

import pytest
from panpipe.core.errors import RequestError
from panpipe.runtimes.launch.progress import show_progress


def planned(report):
    report("measures")
    report("searches", 0, 2)
    report("searches", 1, 2)


def test_each_phase_is_one_line_on_standard_error_without_a_terminal(capsys):
    with show_progress(True, first=True) as report:
        planned(report)
    out, err = capsys.readouterr()
    assert out == ""
    assert [re.sub(r"\d+\.\d", "#", line) for line in err.splitlines()] == [
        "panpipe:   # s  measures", "panpipe:   # s  searches",
    ]  # fmt: skip


@pytest.mark.parametrize(("progress", "first"), [(True, False), (False, True), (False, False)])
def test_other_ranks_and_those_that_want_none_are_silent(capsys, progress, first):
    with show_progress(progress, first) as report:
        planned(report)
    assert capsys.readouterr() == ("", "")


def test_function_is_called_with_phase_and_numbers_on_the_first_rank_alone():
    calls = []
    for first in (True, False):
        with show_progress(lambda *given: calls.append(given), first) as report:
            planned(report)
    assert calls == [("measures", 0, 0), ("searches", 0, 2), ("searches", 1, 2)]


def test_terminal_gets_a_bar_that_is_gone_afterwards(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with show_progress(True, first=True) as report:
        planned(report)
    out, err = capsys.readouterr()
    assert out == ""
    assert "searches" in err
    assert "2 of 2" in err


@pytest.mark.parametrize("progress", ["yes", 1, None])
def test_what_is_neither_a_truth_value_nor_a_function_is_refused(progress):
    said = f"progress is {progress!r}: give True, False, or a function"
    with pytest.raises(RequestError, match=said), show_progress(progress, True):
        pass
