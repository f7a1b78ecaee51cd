"""``replan="auto"``: steps are compared with the plan, and when they drift, all ranks plan again at the same step."""

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...core.errors import RequestError
from ...core.logs import LOGGER
from ..devices.compute import finished_s
from ..engine.step_data import StepOptions
from ..training.trainer import Trainer
from .drift import WINDOW, DriftWatch

CHECK = 4
"""Steps between two questions to the rank of the first device whether steps have drifted."""


class AutomaticReplanning:
    """Plans a pipeline again when its steps drift.

    The rank of the first device decides by its clock, and broadcasts it at the same step.

    Args:
        trainer: of the pipeline.
        replan: plans again; returns whether stages were moved. Raises a RequestError if it cannot.
    """

    def __init__(self, trainer: Trainer, replan: Callable[[], bool]) -> None:
        self._trainer, self._replan = trainer, replan
        self._watch = DriftWatch(trainer.plan)
        self._before_s: float | None = None

    def train(self, batch: Any, options: StepOptions) -> Tensor:
        """Plan again if steps have drifted, and train on a batch. All ranks call this together.

        Returns:
            The loss, as ``Trainer.train``.
        """
        self._before_step()
        start = time.perf_counter()
        loss, _ = self._trainer.train(batch, options)
        ended = max(finished_s(queue.device) for queue in self._trainer.queues.values())
        self._watch.note(ended - start)
        return loss

    def _before_step(self) -> None:
        trainer = self._trainer
        if trainer.counts.steps % CHECK or trainer.runner.accumulating:
            return
        self._log_gain()
        if not trainer.team.decide(self._watch.drifted):
            return
        typical = self._watch.typical_s
        if trainer.team.first and typical is not None:
            LOGGER.warning("the last %d steps took %.4g ms, which the plan does not expect", WINDOW, typical * 1e3)
        try:
            moved = self._replan()
        except RequestError as error:
            moved = False
            if trainer.team.first:
                LOGGER.warning("%s", error)
        if moved:
            self._before_s, self._watch = typical, DriftWatch(trainer.plan)
        else:
            self._watch.keep()

    def _log_gain(self) -> None:
        """Log the measured gain, once there are enough steps after stages were moved."""
        typical = self._watch.typical_s
        if self._before_s is None or typical is None:
            return
        if self._trainer.team.first:
            gain = self._before_s / typical - 1
            LOGGER.warning(
                "steps take %.4g ms since stages were moved, and took %.4g ms before: %+.0f%%",
                typical * 1e3, self._before_s * 1e3, 100 * gain,
            )  # fmt: skip
        self._before_s = None
