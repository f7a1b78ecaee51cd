"""The first steps of training choose the plan; later steps, and later runs, notice when it is slower than it was."""

import time
from typing import Any

import panpipe
import pytest
import torch
from torch import Tensor, nn

BATCH = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
LONG = BATCH.repeat(8, 1)
USUAL_S, SLOW_S, WINDOW = 0.02, 0.1, 12
"""Seconds that are added to a usual step and to a slow one, and the steps whose fastest one counts."""


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


class Trained:
    """A small pipeline whose steps may be slow.

    Args:
        plan: options of the automatic plan.
    """

    def __init__(self, caplog: pytest.LogCaptureFixture, **plan: Any) -> None:
        torch.manual_seed(0)
        self.added_s, self._log = USUAL_S, caplog
        run = panpipe.Run(progress=False, replan="auto", monitor=lambda report: time.sleep(self.added_s))
        self.pipe = panpipe.pipeline(
            nn.Sequential(*(nn.Linear(32, 32) for _ in range(8))), loss, BATCH, optimizer=torch.optim.SGD,
            microbatches=4, plan=panpipe.Auto(**plan), run=run,
        )  # fmt: skip

    def lines(self, steps: int, batch: Tensor = BATCH, *, added_s: float = USUAL_S) -> list[str]:
        """What is logged in some steps."""
        self._log.clear()
        self.added_s = added_s
        for _ in range(steps):
            self.pipe.step(batch)
        return [record.getMessage() for record in self._log.records if record.name == "panpipe"]


@pytest.mark.filterwarnings("ignore:microbatches of a new shape")
def test_next_run_starts_with_the_winner_and_is_compared_with_its_recorded_steps(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PANPIPE_CACHE", str(tmp_path))
    first = Trained(caplog, contest=4)
    while not first.pipe.contest.done:
        first.pipe.step(BATCH)
    again = Trained(caplog)
    assert again.pipe.contest is None
    assert again.pipe.plan.hash == first.pipe.plan.hash
    assert again.lines(WINDOW, LONG, added_s=SLOW_S) == []  # larger batches are no slower steps
    first_line, result, *_ = again.lines(WINDOW + 1, added_s=SLOW_S)
    assert first_line.startswith(f"the fastest of the last {WINDOW} steps took ")
    assert "device" in result
    assert (again.pipe.contest is not None) == ("a faster plan is" in result)
    first.pipe.close()
    again.pipe.close()


def test_another_plan_is_looked_for_once_when_steps_are_slower(caplog):
    trained = Trained(caplog, contest=False, cache=False)
    assert trained.pipe.optimizers  # so that stages stay
    assert trained.lines(WINDOW) == []
    slower, refused = trained.lines(3 * WINDOW, added_s=SLOW_S)
    assert slower.startswith(f"the fastest of the last {WINDOW} steps took ")
    assert "pipe.optimizers was read" in refused
    trained.pipe.close()


@pytest.mark.slow
def test_no_other_plan_is_looked_for_while_gradients_accumulate(caplog):
    trained = Trained(caplog, contest=False, cache=False)
    trained.lines(WINDOW)
    caplog.clear()
    trained.added_s = SLOW_S
    for _ in range(3 * WINDOW):
        trained.pipe.step(BATCH, update=False)
    assert not [record for record in caplog.records if record.name == "panpipe"]
    trained.pipe.close()
