"""One batch, run by a plan on all devices: the one way, for training and for forwards alone.

    microbatches ──▶ programs, compared between ranks ──▶ workers ──▶ results, carried everywhere ──▶ their means
                     (variants, batch_agreement)          (engine)    (engine/results)

What a training step adds, its update and the batches that wait for one, is in `steps`; what forwards add, their own
programs by function and mode, is in `evaluation`.
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
from .variants import Variants


@frozen
class BatchResult:
    """What a batch gave.

    Args:
        loss: the mean over the batch; None of a function that returns rows.
        metrics: the other parts of the step's result, likewise.
        rows: what such a function returned.
        records: device of this process → what it did.
        plan: that ran: the pipeline's, or for other microbatches one derived from it.
        trace: of the clock that the devices ran under, if they did.
    """

    loss: Tensor | None
    metrics: dict[str, float]
    rows: Any
    records: dict[int, StepRecord]
    plan: Plan
    trace: Trace | None


class BatchRun:
    """A batch that is ready to run: once.

    Args:
        variants: what it needs, by the values that the step reads and the shapes of its microbatches.
        pieces: its microbatches.
        microbatches: the most that a replica may have.
        team: the devices.
        workers: those of this process.
        everywhere: whether every process gets the rows that a function returns.

    Attributes:
        prepared: programs and actions for these microbatches.
        agreement: of all ranks about this batch.
        remark: a line for the user where a shape is new.
        results: what the batch returns.

    Raises:
        RequestError: it cannot be captured, or the plan cannot run it, or another rank has another batch.
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
        self._variants, self._workers, self.pieces = variants, workers, pieces
        agree = partial(BatchAgreement, team, workers.queues, pieces)
        self.prepared, self.agreement, self.remark = variants.of(pieces, agree)
        self.results = BatchResults(self.prepared, pieces, microbatches, team, workers, self.agreement, everywhere)

    def run(
        self,
        inputs: StepInputs,
        options: StepOptions,
        refused: str,
        before_end: Callable[[int], None] | None = None,
        after: Callable[[int], None] | None = None,
    ) -> BatchResult:
        """Run it on all devices of this process.

        Args:
            inputs: what the executors work on.
            options: how it runs.
            refused: what became of the model where the batch is refused at its end, for the message.
            before_end: called on each device between its last compute action and the first reduction or optimizer step,
                when its results are announced.
            after: called on each after its last action, when the results are there.

        Raises:
            RequestError: ranks were given different batches.
            WorkerError: a worker stopped.
        """

        def announce(device: int, record: StepRecord) -> None:
            self.results.announce(device, record)
            if before_end is not None:
                before_end(device)

        def collect(device: int) -> None:
            self.results.collect(device)
            if after is not None:
                after(device)

        try:
            records, clocked = self._workers.run(self.prepared, inputs, options, announce, collect)
            self.agreement.refuse(refused)
        except BaseException:
            self._variants.forget()  # a failed run leaves messages and saved tensors
            raise
        loss, metrics = self.results.loss_and_metrics()
        return BatchResult(loss, metrics, self.results.rows, records, self.prepared.plan, clocked)
