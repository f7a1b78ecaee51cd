"""Failures as data, in one process and over ranks."""

import importlib
import pkgutil

import panpipe
import pytest
from panpipe.core.errors import PanpipeError
from panpipe.runtimes.watch.failure import FAMILIES, LIMIT, LINE_LIMIT, shortened, stopped

from ...support.failures import FAILURES, described
from ...support.launch import alone, results


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
