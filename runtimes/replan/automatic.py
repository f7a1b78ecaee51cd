"""``replan="auto"``: when steps become slower for a while, another plan is found and compared with the present one.

fastest of the last 12 steps ──▶ 10 % slower than before? ──▶ a plan for the present speeds ──▶ contest with it
"""

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...core.errors import RequestError
from ...core.logs import LOGGER
from ..devices.compute import finished_s
from ..engine.step_data import StepOptions
from ..optimizer.update import Ending
from ..training.trainer import Trainer

WINDOW = 12
"""Steps whose fastest one counts: a short disturbance does not slow all of them."""
SLOWER = 0.1
"""Share by which it must be slower than before."""
LONGEST = 64
"""Largest number of windows between two attempts that found nothing better."""


class AutomaticReplanning:
    """Plans a pipeline again when its steps become slower.

    The rank of the first device decides by its clock, and broadcasts it at the same step.

    Args:
        trainer: of the pipeline.
        replan: finds a plan for the present speeds and begins a contest with it; returns whether there is one. Raises a
            RequestError if it cannot.
    """

    def __init__(self, trainer: Trainer, replan: Callable[[], bool]) -> None:
        self._trainer, self._replan = trainer, replan
        self._before_s: float | None = None
        self._times, self._steps, self._pause = list[float](), 0, 1

    def train(self, batch: Any, options: StepOptions) -> Tensor:
        """Train on a batch, and plan again before it if steps are slower. All ranks call this together.

        Returns:
            The loss, as ``Trainer.train``.
        """
        if self._steps >= WINDOW * self._pause and not self._trainer.runner.accumulating:
            self._before_step()
        start = time.perf_counter()
        loss, _ = self._trainer.train(batch, options)
        ended = max(finished_s(queue.device) for queue in self._trainer.queues.values())
        if options.ending is Ending.STEP:
            self._times, self._steps = [*self._times, ended - start][-WINDOW:], self._steps + 1
        return loss

    def _before_step(self) -> None:
        trainer, now_s = self._trainer, min(self._times)
        self._steps = 0
        if not trainer.team.decide(lambda: self._before_s is not None and now_s > (1 + SLOWER) * self._before_s):
            self._before_s, self._pause = min(now_s, self._before_s or now_s), 1
            return
        if trainer.team.first:
            LOGGER.warning(
                "the fastest of the last %d steps took %.4g ms, and %.4g ms before", WINDOW, now_s * 1e3,
                1e3 * (self._before_s or now_s),
            )  # fmt: skip
        try:
            begins = self._replan()
        except RequestError as error:
            begins = False
            if trainer.team.first:
                LOGGER.warning("%s", error)
        # The present times are those of the plan now; after attempts without a better plan it waits longer.
        self._before_s, self._pause = None if begins else now_s, 1 if begins else min(2 * self._pause, LONGEST)
