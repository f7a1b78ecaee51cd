"""Drift: steps that are outside the plan's interval for a while, and what follows."""

import time
from unittest import mock

import pytest
import torch
from attrs import evolve
from panpipe.core.errors import RequestError
from panpipe.core.plan.plan import Plan
from panpipe.runtimes.engine.step_data import StepOptions
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.replan.automatic import CHECK, AutomaticReplanning
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


class Counting:
    """A trainer as far as automatic replanning uses it, whose steps take the time that it is given."""

    def __init__(self, interval_s):
        self.team, self.plan = ThreadTeam(2), planned(interval_s)
        self.counts = self.runner = self
        self.steps, self.accumulating, self.replanned = 0, False, []
        self._now_s, self._step_s = 0.0, [0.0]

    def _now(self):
        return self._now_s

    def train(self, batch, options):
        self._now_s += self._step_s[0]
        self.steps += 1
        return torch.zeros(()), options

    def run(self, automatic, step_s, steps):
        self._step_s = step_s
        with mock.patch.object(time, "perf_counter", self._now):
            for _ in range(steps):
                automatic.train(None, StepOptions())


def test_pipeline_is_planned_again_after_drift_and_the_measured_gain_is_logged(caplog):
    trainer, step_s = Counting((0.9, 1.1)), [1.0]

    def replan():
        trainer.replanned.append(trainer.steps)
        trainer.plan, step_s[0] = planned(None), 1.5
        return True

    automatic = AutomaticReplanning(trainer, replan)
    trainer.run(automatic, step_s, 5 * WINDOW)
    assert trainer.replanned == []
    step_s[0] = 2.0
    trainer.run(automatic, step_s, 5 * WINDOW)
    (at,) = trainer.replanned
    assert 5 * WINDOW < at <= 6 * WINDOW + CHECK
    assert at % CHECK == 0
    said = [record.getMessage() for record in caplog.records if record.name == "panpipe"]
    assert said == [
        f"the last {WINDOW} steps took 2000 ms, which the plan does not expect",
        "steps take 1500 ms since stages were moved, and took 2000 ms before: +33%",
    ]


def test_attempt_without_a_gain_or_with_an_error_is_not_repeated_at_once(caplog):
    def refused():
        trainer.replanned.append(trainer.steps)
        raise RequestError("no")

    trainer = Counting((0.9, 1.1))
    automatic = AutomaticReplanning(trainer, refused)
    trainer.run(automatic, [2.0], 20 * WINDOW)
    assert len(trainer.replanned) == 1  # the present times are those of the plan now
    assert "no" in [record.getMessage() for record in caplog.records]


def test_no_attempt_is_made_while_gradients_accumulate():
    trainer = Counting((0.9, 1.1))
    trainer.accumulating = True
    automatic = AutomaticReplanning(trainer, lambda: trainer.replanned.append(0))
    trainer.run(automatic, [2.0], 3 * WINDOW)
    assert trainer.replanned == []
