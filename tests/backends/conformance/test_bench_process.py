"""The process that runs the rules, inside this one: its reports for each device and rule, and where it stops."""

import multiprocessing

import pytest
import torch
from attrs import evolve
from panpipe.backends import memcpy
from panpipe.backends.conformance import bench_process
from panpipe.backends.conformance.bench_process import Job, serve
from panpipe.backends.conformance.payload import BrokenRuleError
from panpipe.backends.conformance.rules import Rule


class Ended(Exception):
    """Raised in place of the end of the process."""


@pytest.fixture(autouse=True)
def kept_running(monkeypatch):
    def end(status):
        raise Ended(status)

    monkeypatch.setattr(bench_process.os, "_exit", end)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def rules(monkeypatch, *functions):
    found = [Rule(function.__name__, "", function) for function in functions]
    monkeypatch.setattr(bench_process, "RULES", found)
    monkeypatch.setattr(bench_process, "rules_of", lambda kind: found)


def reports(kind=memcpy.KIND, first=0):
    """Rule → device → what was reported of it."""
    here, there = multiprocessing.Pipe(duplex=False)
    with pytest.raises(Ended, match="0"):
        serve(Job(kind, False, 2, "cpu", first, 0), [0, 1], there)
    found = {}
    while here.poll():
        try:
            device, rule, problem = here.recv()
        except EOFError:
            break
        found.setdefault(rule, {})[device] = problem
    return found


def test_every_device_runs_the_rules_from_the_first_one(monkeypatch):
    ran = []

    def skipped(bench):
        ran.append("skipped")

    def exchanged(bench):
        ran.append(bench.end.device)
        peer = 1 - bench.end.device
        handle, (buffer,) = bench.receive([torch.zeros(2)], peer)
        bench.send([torch.full((2,), float(bench.end.device))], peer)[0].wait()
        handle.wait()
        assert buffer.tolist() == [float(peer)] * 2

    rules(monkeypatch, skipped, exchanged)
    assert reports(first=1) == {0: {0: None, 1: None}, 1: {0: None, 1: None}}
    assert sorted(ran) == [0, 1]


def test_device_stops_after_a_broken_rule_and_reports_why(monkeypatch):
    def broken(bench):
        if bench.end.device:
            raise BrokenRuleError("two is not three")

    def failing(bench):
        raise OSError("no wire")

    rules(monkeypatch, broken, failing)
    assert reports() == {
        -1: {0: None, 1: None},
        0: {0: None, 1: "two is not three"},
        1: {0: "OSError: no wire"},
    }


def test_only_dtypes_that_the_backend_moves_are_tried(monkeypatch):
    tried = []

    def noted(bench):
        tried.append((bench.dtypes, bench.where, bench.alone))

    rules(monkeypatch, noted)
    reports(evolve(memcpy.KIND, dtypes=frozenset({torch.float32, torch.float64})))
    dtypes, where, alone = tried[0]
    assert set(dtypes) == {torch.float32, torch.float64}
    assert (where, alone) == (torch.device("cpu"), False)


def test_failure_to_connect_is_the_first_rules_problem(monkeypatch):
    def unconnected(count):
        raise OSError("no wire")

    rules(monkeypatch, lambda bench: None)
    here, there = multiprocessing.Pipe(duplex=False)
    with pytest.raises(OSError, match="no wire"):
        serve(Job(evolve(memcpy.KIND, threads=unconnected), False, 2, "cpu", 4, 0), [0, 1], there)
    assert [here.recv() for _ in range(2)] == [(d, 4, "connecting failed with OSError: no wire") for d in (0, 1)]


def test_failure_of_one_devices_connect_is_reported_of_that_device(monkeypatch):
    def threads(count):
        ends = memcpy.KIND.threads(count)

        def connect(pairs):
            raise ValueError("no such peer")

        ends[1].connect = connect
        return ends

    rules(monkeypatch, lambda bench: None)
    assert reports(evolve(memcpy.KIND, threads=threads)) == {
        -1: {0: None},
        0: {0: None, 1: "connect failed with ValueError: no such peer"},
    }
