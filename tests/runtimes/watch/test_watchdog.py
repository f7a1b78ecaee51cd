"""The thread that measures progress: why a rank cannot go on, where it is, and the one line that is printed."""

import contextlib
import io
import threading

import pytest
from panpipe.runtimes.watch import watchdog
from panpipe.runtimes.watch.activity import Activity
from panpipe.runtimes.watch.positions import Position
from panpipe.runtimes.watch.watchdog import ReasonPrinter, Watchdog


@pytest.fixture
def make(monkeypatch):
    """Watchdogs whose threads have ended: tests call what the threads would."""
    monkeypatch.setattr(watchdog, "hosts_store", lambda rank: rank == 0)
    monkeypatch.setattr(watchdog, "uses_agent_store", lambda: False)
    made = []

    def create(rank=1, timeout_s=8.0, on=()):
        found = Watchdog(rank, Activity(on=on), timeout_s, lambda reason: None)
        found.stop()
        made.append(found)
        return found

    return create


def test_reason_is_printed_at_once_while_output_is_collected_in_a_buffer(capfd):
    """As torch's hook for uncaught exceptions collects it: another thread may end the process before it is shown."""
    with contextlib.redirect_stderr(io.StringIO()) as buffer:
        ReasonPrinter().print("rank 2 stopped", 0)
    assert buffer.getvalue() == ""
    assert capfd.readouterr().err == "panpipe: rank 2 stopped; rank 0 stops too\n"


def test_rank_that_waits_where_the_store_is_silent_ends_after_the_limit(make):
    found = make(on=(2,))
    found.quiet_s = 8.0
    assert found._reason(8.0, 0.0) == (
        "rank 1 waited 8 s for rank 2 outside of panpipe; rank 0 gave no sign of life for 8 s: see "
        "what it does there, or raise timeout_s, which is 8 s"
    )
    assert found._reason(7.9, 0.0) is None
    found.quiet_s = 7.9
    assert found._reason(8.0, 0.0) is None


def test_rank_that_waits_for_nobody_or_has_the_store_goes_on(make):
    alone, host = make(), make(rank=0, on=(1,))
    alone.quiet_s = host.quiet_s = 99.0
    assert alone._reason(99.0, 0.0) is None
    assert host._reason(99.0, 0.0) is None


@pytest.mark.parametrize(("silent_s", "reporting_s", "ends"), [(4.0, 8.0, True), (3.9, 8.0, False), (9.0, 7.9, False)])
def test_report_of_a_failure_ends_where_the_store_does_not_answer_it(make, silent_s, reporting_s, ends):
    found = make()
    found.reporting = True
    assert (found._reason(silent_s, reporting_s) is not None) is ends


@pytest.mark.parametrize(
    ("on", "quiet_s", "ends"), [((0,), 8.0, True), ((2,), 7.9, False), ((2,), 8.0, True), ((), 99.0, False)]
)
def test_rank_that_waits_after_rank_0_has_left_ends(make, on, quiet_s, ends):
    found = make(on=on)
    found.store_has_ended, found.quiet_s, found.host = True, quiet_s, Position("closed", left="")
    reason = found._reason(0.0, 0.0)
    assert (reason is not None) is ends
    if ends:
        assert reason == found.left_by_rank_0()
        assert reason.startswith("rank 0 has closed its pipeline, and rank 1 is outside of panpipe: every rank of a")


def test_silent_agent_is_named_as_the_process_that_started_the_job(make, monkeypatch):
    monkeypatch.setattr(watchdog, "uses_agent_store", lambda: True)
    found = make(on=(0, 2))
    found.quiet_s = 9.0
    reason = found._reason(9.0, 0.0)
    assert reason.startswith(
        "the process that started the job, with its store, gave no answer for 9 s; rank 1 waited 9"
    )
    assert "for rank 0, rank 2" in reason


def test_progress_of_computation_counts_in_parts_of_the_limit(make, monkeypatch):
    found = make(timeout_s=10.0)
    found._activity.computing = True
    monkeypatch.setattr(watchdog.time, "process_time", lambda: 1.4)
    assert found._computed() == 2  # half a second each
    found._activity.computing = False
    assert found._computed() == 0


def test_thread_ends_the_process_for_a_reason():
    ended, reasons = threading.Event(), []

    def end(reason):
        reasons.append(reason)
        ended.set()

    found = Watchdog(1, Activity(on=(0,)), 0.2, end)
    found.store_has_ended, found.host = True, Position("closed", left="")
    try:
        assert ended.wait(20)
    finally:
        found.stop()
    assert reasons[0].startswith("rank 0 has closed its pipeline")


def test_only_the_first_reason_is_printed(capfd):
    printer = ReasonPrinter()
    printer.print("rank 2 stopped", 1)
    printer.print("the connection closed", 1)
    assert capfd.readouterr().err == "panpipe: rank 2 stopped; rank 1 stops too\n"
