"""``replan="auto"``: when all ranks plan again, and what is logged."""

import time
from unittest import mock

import torch
from attrs import evolve
from panpipe.core.errors import RequestError
from panpipe.core.plan.plan import Plan
from panpipe.runtimes.devices.compute import HostQueue
from panpipe.runtimes.engine.step_data import StepOptions
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.replan.automatic import CHECK, AutomaticReplanning
from panpipe.runtimes.replan.drift import WINDOW

from ...support.plans import orders, plan_of


def planned(interval_s) -> Plan:
    plan = plan_of(orders("0F0 0B0", "1F0 1B0"), (0, 1))
    return evolve(plan, prediction=evolve(plan.prediction, interval_s=interval_s))


class Counting:
    """A trainer as far as automatic replanning uses it, whose steps take the time that it is given."""

    def __init__(self, interval_s):
        self.team, self.plan = ThreadTeam(2), planned(interval_s)
        self.counts = self.runner = self
        self.steps, self.accumulating, self.replanned, self.queues = 0, False, [], {0: HostQueue()}
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


def test_loss_and_the_options_of_a_step_are_those_of_the_trainer():
    trainer, options = Counting((0.9, 1.1)), StepOptions()
    given = []
    trainer.train = lambda *arguments: (given.append(arguments), (torch.tensor(2.5), None))[1]
    assert AutomaticReplanning(trainer, lambda: False).train("batch", options) == 2.5
    assert given == [("batch", options)]
