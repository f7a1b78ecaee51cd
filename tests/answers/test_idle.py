"""Idle time by cause, as text and as plain data."""

from types import SimpleNamespace

import pytest
from panpipe.answers.idle import idle_answer, idle_of, print_idle
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.evaluate.idle import CAUSES, SHARED_LINKS, IdleTime
from panpipe.simulators.run import simulate

from ..support.plans import scheduled

SHARED = next(cause for cause in CAUSES if cause == SHARED_LINKS)
OTHER = next(cause for cause in CAUSES if cause != SHARED_LINKS)
IDLE = IdleTime(4.0, 3.0, {OTHER: 0.75, SHARED: 0.25}, {"gpu0 → nic": 0.2498, "nic → gpu1": 0.0002})


def test_answer_has_seconds_and_shares_of_the_step():
    found = idle_answer(IDLE)
    assert (found["step_s"], found["compute_s"], found["idle_s"], found["idle_share"]) == (4.0, 3.0, 1.0, 0.25)
    assert found["causes"] == [
        {"cause": OTHER, "seconds": 0.75, "share": 0.1875},
        {"cause": SHARED, "seconds": 0.25, "share": 0.0625},
    ]
    assert [each["link"] for each in found["contention_by_link"]] == ["gpu0 → nic", "nic → gpu1"]


def test_step_without_time_has_shares_of_zero():
    assert idle_answer(IdleTime(0.0, 0.0, {OTHER: 0.0}, {}))["causes"] == [
        {"cause": OTHER, "seconds": 0.0, "share": 0.0}
    ]


def test_table_has_the_largest_cause_first_and_its_links(capsys):
    print_idle(IDLE)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0] == "Why not faster: devices idle 25.0% of the step, 1 s on average"
    rows = [line for line in lines if "%" in line][1:]
    assert [row.split("  ")[0] for row in rows] == [OTHER, SHARED, "gpu0 → nic"]
    assert "18.8%" in rows[0]
    assert "750 ms" in rows[0]
    assert "nic → gpu1" not in " ".join(lines)  # below 0.05 % of the step


def test_cause_below_the_least_share_is_not_printed(capsys):
    print_idle(IdleTime(4.0, 3.0, {OTHER: 0.0019, SHARED: 0.0021}, {}))
    text = capsys.readouterr().out
    assert SHARED in text
    assert f"\n{OTHER}" not in text


def test_idle_time_of_a_simulated_step():
    found = idle_of(simulate(scheduled("1f1b", 2, 4)))
    # three unit actions for each of four microbatches; the fill and the drain of the other device is idle
    assert (found.compute_s, found.step_s) == (12.0, 15.0)
    assert sum(found.causes.values()) == pytest.approx(3.0)
    assert not found.by_link


def test_waits_are_those_of_full_links_or_the_delays_of_transfers():
    from panpipe.answers.idle import _waits

    use = SimpleNamespace(src="a", dst="b", delay_s=2.0)
    assert _waits(SimpleNamespace(contention=[{}, {}], links=[use])) == {"a → b": 2.0}
    contention = [{("a", "b"): 0.5}, {("a", "b"): 0.25, ("b", "c"): 1.0}]
    assert _waits(SimpleNamespace(contention=contention, links=[use])) == {"a → b": 0.75, "b → c": 1.0}


def test_idle_time_of_a_contended_step_names_its_link():
    plan = scheduled("1f1b", 2, 4, cluster=fully_connected(2, 10**9, 10.0, 0.0))
    assert idle_of(simulate(plan)).idle_s > 3.0
