"""What follows a step: its batch and its loss are checked, and monitors get its numbers.

On a GPU the numbers of a step are known long after its actions were issued. If no update depends on them, the host
reads them after it has issued the next step, so that the device does not wait for the host::

    host     step 1 │ step 2 │ checks of 1 │ step 3 │ checks of 2 │ …
    device       ╰─ step 1 ──╯╰─ step 2 ────────────╯╰─ step 3 ──

With monitors, and with ``on_nonfinite`` ``"raise"`` or ``"skip"``, a step is checked before it returns.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from attrs import evolve

from ...core.errors import NonFiniteError
from ..devices.compute import ComputeQueue
from ..engine.results import Batch, BatchResult
from ..engine.step_data import StepOptions
from ..lazy_value import LazyValue
from ..monitor.monitors import Monitor
from ..optimizer.training import Training
from ..optimizer.update import Ending, NonFiniteNorm, Update
from .local_stages import LocalStages
from .monitoring import Monitoring, UpdateNumbers
from .non_finite import LossCheck
from .state import PipelineState


class StepChecks:
    """Checks steps, and reports them to monitors.

    Args:
        training: has what to do if a loss is not finite.
        monitors: the user's functions.
        stages: of this process.
        queues: device of this process → its compute queue.
        scaled: whether a scaler skips updates.
        state: of the pipeline.
    """

    def __init__(
        self,
        training: Training,
        monitors: Sequence[Monitor],
        stages: LocalStages,
        queues: Mapping[int, ComputeQueue],
        scaled: bool,
        state: PipelineState,
    ) -> None:
        self._loss, self._scaled = LossCheck(training.on_nonfinite, stages), scaled
        self._monitoring = Monitoring(monitors, stages, queues)
        self._team, self._queues = stages.team, queues
        self._last: Callable[[], NonFiniteError | None] | None = None
        self._state = state

    def follow(self, stages: LocalStages, queues: Mapping[int, ComputeQueue]) -> None:
        """Continue with the stages and queues of another plan."""
        self._queues = queues
        self._loss.follow(stages)
        self._monitoring.follow(stages, queues)

    def options(self, options: StepOptions) -> StepOptions:
        """The options of a step that is checked."""
        return evolve(self._monitoring.options(options), peaks=self._loss.on)

    def check(
        self,
        ready: Batch,
        done: BatchResult,
        ending: Ending,
        outcome: str,
        end: Update,
        update: UpdateNumbers,
        start: float,
    ) -> None:
        """Check a step, and report it. All ranks call this together.

        Args:
            ready: its batch.
            done: its result.
            ending: its ending.
            outcome: the state of the model if the batch is refused, for the message.
            end: its update on the first device of this process.
            update: the numbers of its update.
            start: when the step was called, on Python's performance counter.

        Raises:
            NonFiniteError: the loss or the norm is not finite, and this is to be raised.
            RequestError: ranks were given different batches.
        """
        took_s = time.perf_counter() - start
        updated, start_read = update.due and not update.skipped, self._queues[self._team.local[0]].start_read
        assert done.loss is not None
        loss, norm = start_read(done.loss), LazyValue[NonFiniteNorm | None](lambda: None)
        if update.due and self._loss.on and not self._scaled:
            norm = end.non_finite_norm(start_read)

        def check_now() -> NonFiniteError | None:
            ready.agreement.refuse(outcome)
            return self._loss.check(done, ready, update.step, ending, updated, loss, norm)

        ahead = any(queue.runs_ahead for queue in self._queues.values())
        if ahead and updated and not self._monitoring.on and (self._loss.warns or not self._loss.on):
            self._last = check_now
            return
        failure = check_now()
        if self._monitoring.on:
            self._monitoring.report(done, ready.pieces, took_s, update)
        self._raise(failure)

    def check_last(self) -> None:
        """Check the last step if `check` has postponed that. All ranks call this together.

        Raises:
            RequestError: ranks were given different batches.
        """
        check, self._last = self._last, None
        if check is not None:
            self._raise(check())

    def drop_last(self) -> None:
        """Do not check the last step, because its state is replaced."""
        self._last = None

    def close(self) -> None:
        """Close the monitors."""
        self._monitoring.close()

    def _raise(self, failure: NonFiniteError | None) -> None:
        if failure is not None:
            self._state.accumulated = None
            raise failure
