"""Drift: steps that are outside the plan's interval for a while."""

import pytest
from attrs import evolve
from panpipe.core.plan.plan import Plan
from panpipe.runtimes.replan.drift import WARM_UP, WINDOW, DriftWatch

from ...support.plans import orders, plan_of


def planned(interval_s) -> Plan:
    plan = plan_of(orders("0F0 0B0", "1F0 1B0"), (0, 1))
    return evolve(plan, prediction=evolve(plan.prediction, interval_s=interval_s))


def watch_of(interval_s, *spans):
    """A watch that saw steps: (seconds, how many)."""
    watch = DriftWatch(planned(interval_s))
    for _ in range(WARM_UP):
        watch.note(100.0)  # the first steps compile
    for step_s, count in spans:
        for _ in range(count):
            watch.note(step_s)
    return watch


@pytest.mark.parametrize(
    ("spans", "drifted"),
    [
        ([(1.0, WINDOW)], False),
        ([(1.2, WINDOW)], False),  # outside the interval by less than the margin
        ([(2.0, WINDOW - 1)], False),  # not long enough
        ([(2.0, WINDOW)], True),
        ([(0.5, WINDOW)], True),
        ([(1.0, 40), (9.0, WINDOW // 3)], False),  # a short disturbance
        ([(9.0, 40), (1.0, WINDOW)], False),  # it has ended
    ],
)
def test_typical_step_outside_the_interval_for_a_window_is_drift(spans, drifted):
    assert watch_of((0.9, 1.1), *spans).drifted() is drifted


def test_first_steps_are_the_interval_of_a_plan_without_one():
    watch = watch_of(None, (3.0, WINDOW))
    assert not watch.drifted()
    for _ in range(WINDOW):
        watch.note(3.2)
    assert not watch.drifted()
    for _ in range(WINDOW):
        watch.note(4.2)
    assert watch.drifted()


def test_wait_between_vain_attempts_doubles():
    watch, waits = watch_of((0.9, 1.1), (2.0, WINDOW)), []
    for step_s in (2.0, 4.0, 8.0):
        for _ in range(WINDOW):
            watch.note(step_s)
        assert watch.drifted()
        watch.keep()
        for count in range(1, 40 * WINDOW):
            watch.note(2 * step_s)
            if watch.drifted():
                waits.append(count)
                break
    assert waits == [2 * WINDOW, 3 * WINDOW, 5 * WINDOW]  # what is not counted, and a window
