"""Runs one batch by a plan on all devices, for training and for forwards alone.

    microbatches ──▶ programs, compared between ranks ──▶ workers ──▶ results, sent to all ranks ──▶ their means
                     (variants, batch_agreement)          (engine)    (engine/results)

`steps` adds the update of a training step and gradient accumulation over batches. `evaluation` adds programs for other
functions and modes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from attrs import frozen
from torch import Tensor

from ...core.plan.plan import Plan
from ...core.trace.trace import Trace
from ..batch.batch_agreement import BatchAgreement
from ..batch.microbatches import Microbatch
from ..engine.results import BatchResults
from ..engine.step_data import StepInputs, StepOptions, StepRecord
from ..engine.workers import Workers
from ..launch.team import Team
from ..lazy_value import LazyValue
from .value_variants import Variants


@frozen
class BatchResult:
    """The result of a batch.

    Args:
        loss: the mean over the batch, on the first device of this process; None for a function that returns rows.
        metrics: the means of the other parts of the step's result, read when they are asked for.
        rows: the return value of such a function; None for a training step.
        records: device of this process → its record.
        plan: the plan that ran: the pipeline's, or one derived from it for other microbatches.
        trace: the clock's trace; None for real devices.
    """

    loss: Tensor | None
    metrics: LazyValue[dict[str, float]]
    rows: Any
    records: dict[int, StepRecord]
    plan: Plan
    trace: Trace | None


class BatchRun:
    """A batch that is ready to run once.

    Args:
        variants: prepared steps, by the Python values that the step reads and the shapes of microbatches.
        pieces: the batch's microbatches.
        microbatches: the largest number of microbatches of a replica.
        team: the devices.
        workers: the devices of this process.
        everywhere: whether every process gets the rows that a function returns.

    Attributes:
        prepared: programs and actions for these microbatches.
        agreement: compares this batch between all ranks.
        remark: a line for the user if a shape is new; otherwise None.
        results: the results of the batch.

    Raises:
        RequestError: the step cannot be captured, or the plan cannot run it, or another rank has another batch.
    """

    def __init__(
        self,
        variants: Variants,
        pieces: list[Microbatch],
        microbatches: int,
        team: Team,
        workers: Workers,
        everywhere: bool = True,
    ) -> None:
        self._variants, self._workers, self.pieces, self._team = variants, workers, pieces, team
        agree = partial(BatchAgreement, team, workers.queues, pieces)
        self.prepared, self.agreement, self.remark = variants.of(pieces, agree)
        if team.tensor is not None:  # collectives of tensors of different shapes would hang
            self.agreement.refuse_before_run()
        self.results = BatchResults(self.prepared, pieces, microbatches, team, workers, self.agreement, everywhere)

    def run(
        self,
        inputs: StepInputs,
        options: StepOptions,
        outcome: str,
        before_end: Callable[[int], None] | None = None,
        after: Callable[[int], None] | None = None,
    ) -> BatchResult:
        """Run it on all devices of this process.

        Args:
            inputs: of the step.
            options: how it runs.
            outcome: the state of the model if the batch is refused at its end, for the message.
            before_end: called on each device between its last compute action and the first reduction or optimizer step,
                after its results were sent.
            after: called on each device after its last action, when it has all results.

        Raises:
            RequestError: ranks were given different batches. If the host would wait for the device to know it
                (``agreement.waits``), the caller asks later: ``agreement.refuse``.
            WorkerError: a worker stopped.
        """

        def start_exchange(device: int, record: StepRecord) -> None:
            self.results.start_exchange(device, record)
            if before_end is not None:
                before_end(device)

        def collect(device: int) -> None:
            with self._team.waiting("the results"):
                self.results.collect(device)
            if after is not None:
                after(device)

        try:
            records, clocked = self._workers.run(self.prepared, inputs, options, start_exchange, collect)
            if not self.agreement.waits:
                self.agreement.refuse(outcome)
        except BaseException:
            self._variants.forget()  # a failed run leaves messages and saved tensors
            raise
        results = self.results
        return BatchResult(results.loss(), results.metrics(), results.rows, records, self.prepared.plan, clocked)
