"""``replan="auto"``: when all ranks look for another plan, and what is logged."""

import time
from unittest import mock

import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.devices.compute import HostQueue
from panpipe.runtimes.engine.step_data import StepOptions
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.replan.replanner import WINDOW, AutomaticReplanning
from panpipe.runtimes.training.state import Accumulated, PipelineState


class Counting:
    """A trainer as far as automatic replanning uses it, whose steps take the time that it is given."""

    def __init__(self):
        self.team, self.state = ThreadTeam(2), PipelineState()
        self.steps, self.replanned, self.queues = 0, [], {0: HostQueue()}
        self._now_s, self._step_s = 0.0, 0.0

    def _now(self):
        return self._now_s

    def train(self, batch, options):
        self._now_s += self._step_s
        self.steps += 1
        return torch.zeros(()), options

    def run(self, automatic, step_s, steps):
        self._step_s = step_s
        with mock.patch.object(time, "perf_counter", self._now):
            for _ in range(steps):
                automatic.train(None, StepOptions())


def test_another_plan_is_looked_for_when_all_of_twelve_steps_are_slower(caplog):
    trainer = Counting()
    automatic = AutomaticReplanning(trainer, lambda: bool(trainer.replanned.append(trainer.steps)) or True)
    trainer.run(automatic, 1.0, 5 * WINDOW)
    trainer.run(automatic, 2.0, WINDOW - 1)
    trainer.run(automatic, 1.0, 1)
    assert trainer.replanned == []
    trainer.run(automatic, 2.0, 3 * WINDOW)
    assert trainer.replanned == [7 * WINDOW]
    said = [record.getMessage() for record in caplog.records if record.name == "panpipe"]
    assert said == [f"the fastest of the last {WINDOW} steps took 2000 ms, and 1000 ms before"]


def test_attempt_with_an_error_is_not_repeated(caplog):
    def refused():
        trainer.replanned.append(trainer.steps)
        raise RequestError("no")

    trainer = Counting()
    automatic = AutomaticReplanning(trainer, refused)
    trainer.run(automatic, 1.0, WINDOW + 1)
    trainer.run(automatic, 2.0, 20 * WINDOW)
    assert len(trainer.replanned) == 1  # the present times are those of the plan now
    assert "no" in [record.getMessage() for record in caplog.records]


def test_no_attempt_is_made_while_gradients_accumulate():
    trainer = Counting()
    automatic = AutomaticReplanning(trainer, lambda: trainer.replanned.append(0))
    trainer.run(automatic, 1.0, WINDOW + 1)
    trainer.state.accumulated = Accumulated(8, 1.0, None)
    trainer.run(automatic, 2.0, 3 * WINDOW)
    assert trainer.replanned == []
