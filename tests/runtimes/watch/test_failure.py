"""Failures as data, over ranks, when they end a process; and what a signal prints."""

import gc
import importlib
import os
import pkgutil
import signal
import sys

import panpipe
import pytest
from panpipe.core.errors import PanpipeError, RequestError, WorkerError
from panpipe.runtimes.watch import process
from panpipe.runtimes.watch.failure import FAMILIES, LIMIT, LINE_LIMIT, shortened, stopped
from panpipe.runtimes.watch.process import SIGNAL, WhereOnSignal, print_uncaught_in_a_line

from ...support.failures import FAILURES, described
from ...support.launch import alone, results

# Failures as data, in one process and over ranks.


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> list[dict]:
    """What two ranks saw of every failure."""
    return results("failing", tmp_path_factory.mktemp("failing"))


def family(failure: PanpipeError) -> str:
    return next(each.__name__ for each in type(failure).__mro__ if each in FAMILIES.values())


def expected(name: str, rank: int) -> dict:
    """What another rank sees of a failure on this one."""
    failure = FAILURES[name]()
    if name == "a plug-in's worker":  # without what a WorkerError has
        return {**described(failure), "class": "PanpipeError"} | {"suspects": None}
    if isinstance(failure, PanpipeError):
        return {**described(failure), "class": family(failure)}
    reason = stopped(rank, failure, LIMIT)
    return {"class": "WorkerError", "status": 1, "size": len(reason), "message": reason[:300], "suspects": []}


def without_none(described: dict) -> dict:
    return {name: value for name, value in described.items() if value is not None}


def subclasses(of: type) -> set[type]:
    return {of}.union(*map(subclasses, of.__subclasses__()))


def test_every_error_class_is_among_the_tested_failures():
    for module in pkgutil.walk_packages(panpipe.__path__, "panpipe."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    own = {each for each in subclasses(PanpipeError) if each.__module__.startswith("panpipe.")}
    assert set(FAMILIES.values()) <= own
    assert own <= {type(make()) for make in FAILURES.values()}


def test_failure_reasons_are_short_and_printable():
    assert len(stopped(1, FAILURES["a huge message"]())) == LINE_LIMIT
    assert stopped(1, FAILURES["a huge message"]()).endswith(" … (3000030 characters)")
    assert stopped(1, FAILURES["no message"]()) == "rank 1 stopped: Unprintable: (its message raised KeyError)"
    assert shortened("caf\udce9 größer") == "caf\\udce9 größer"
    for make in FAILURES.values():
        stopped(0, make()).encode()


@pytest.mark.parametrize("way", ["decide", "agree"])
@pytest.mark.parametrize("name", FAILURES)
def test_failure_of_one_rank_is_raised_on_the_other_with_its_status(seen, way, name):
    raised, other = (0, 1) if way == "decide" else (1, 0)
    assert seen[raised][f"{way} {name}"] == described(FAILURES[name]())
    assert seen[other][f"{way} {name}"] == without_none(expected(name, raised))
    assert seen[0]["afterwards"] == seen[1]["afterwards"] == "all is well"


@pytest.mark.parametrize(
    ("name", "status"),
    [("NothingFits", 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in
                           [("RequestError", 2), ("WorkerError", 1), ("a plug-in's request", 7)])],
)  # fmt: skip
def test_every_rank_ends_with_the_status_of_the_failure(tmp_path, name, status):
    assert [one.returncode for one in alone("ending", tmp_path, FAILURE=name)] == [status, status]


# Exceptions that end a process, and how they are printed.


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


# What a signal prints: where every pipeline that is alive is; handlers of the user are kept.


class Pipeline:
    def __init__(self, text):
        self.text = text

    def where(self):
        return self.text


@pytest.fixture
def where(monkeypatch):
    """An object of its own, with the process's handler and wakeup descriptor put back afterwards."""
    monkeypatch.setattr(process, "_AGAIN_S", 0.0)
    handler, descriptor = signal.getsignal(SIGNAL), signal.set_wakeup_fd(-1)
    signal.signal(SIGNAL, signal.SIG_DFL)
    found = WhereOnSignal()
    yield found
    mine = signal.set_wakeup_fd(descriptor)
    signal.signal(SIGNAL, handler)
    if found._received is not None:
        os.close(found._received)
        os.close(mine)


def test_every_live_pipeline_is_printed(where, capfd):
    first, second = Pipeline("rank 0 is in step 1"), Pipeline("rank 1 is in step 2")
    where.add(first)
    where.add(second)
    where.print()
    lines = capfd.readouterr().err.splitlines()
    assert {line.partition("rank")[2] for line in lines} == {" 0 is in step 1", " 1 is in step 2"}
    assert all(line.startswith("panpipe: 20") for line in lines)
    where.remove(first)
    del second
    gc.collect()
    where.print()
    assert capfd.readouterr().err.endswith("no pipeline is open here\n")


def test_handler_of_the_user_is_left_as_it_is(where):
    def own(number, frame):
        pass

    signal.signal(SIGNAL, own)
    where.install()
    assert signal.getsignal(SIGNAL) is own
    assert where._received is None
