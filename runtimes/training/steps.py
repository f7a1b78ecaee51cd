"""One training step over the devices of this process."""

import math

import torch
from attrs import frozen
from torch import Tensor

from ...core.plan.plan import Plan
from ...core.trace.trace import Trace
from ..batch.batch_agreement import BatchAgreement
from ..batch.microbatches import Microbatch
from ..engine.batch_results import BatchResults, weight_of
from ..engine.executor import StepInputs, StepRecord
from ..engine.prepared import Prepared
from ..engine.results import SharedResults
from ..engine.workers import Order, Workers
from ..optimizer.replicas import share, totals_of_all
from ..optimizer.training import Training
from ..optimizer.update import Ending
from .kept_gradients import KeptGradients
from .local_stages import LocalStages
from .variants import Variants


@frozen
class StepResult:
    """What a step gave.

    Args:
        loss: the mean over the batch.
        metrics: the other parts of the step's result, likewise.
        records: device of this process → what it did.
        plan: that ran: the pipeline's, or for other microbatches one derived from it.
        norm: the global norm of the gradients, before clipping, where it was asked for.
        skipped: whether the update was, because a gradient was not finite.
        trace: of the clock that the devices ran under, if they did.
    """

    loss: Tensor
    metrics: dict[str, float]
    records: dict[int, StepRecord]
    plan: Plan
    norm: Tensor | None
    skipped: bool
    trace: Trace | None = None


@frozen
class Gathered:
    """Batches whose gradients wait for the update.

    Args:
        samples: of the first of them: what the shares of the others are measured by.
        divisor: what the gradients are to be divided by: the sum of the step's weights, or of the batches' sizes, the
            first one's being 1.
        scale: what the losses of all of them are multiplied by, whatever becomes of the scaler meanwhile; None for 1.
    """

    samples: int
    divisor: float
    scale: float | None


class StepRunner:
    """Runs steps.

    Args:
        stages: of this process.
        variants: what a step needs, by the values that it reads and the shapes of its microbatches.
        workers: those of this process.
        training: how the model is trained.
        largest: samples of the largest microbatch of the example.
    """

    def __init__(
        self, stages: LocalStages, variants: Variants, workers: Workers, training: Training, largest: int
    ) -> None:
        self._loss_scale = training.loss_scale()
        self._gathered: Gathered | None = None
        self._kept: KeptGradients | None = None
        self._workers = workers
        self._plan, self._states, self._team, self._variants = stages.plan, stages.states, stages.team, variants
        self.seed, self._largest = training.seed, largest

    @property
    def gathering(self) -> bool:
        """Whether gradients of batches wait for the update."""
        return self._gathered is not None

    def begin_anew(self) -> None:
        """Let go of gradients that wait."""
        self._gathered = None

    def run(
        self, prepared: Prepared, pieces: list[Microbatch], agreement: BatchAgreement, index: int, trace: bool,
        watch: bool, ending: Ending,
    ) -> StepResult:  # fmt: skip
        """Run one step.

        Args:
            prepared: for these microbatches.
            pieces: the microbatches.
            agreement: of all ranks about this batch.
            index: number of the step, for random numbers.
            trace: record every action.
            watch: record the saved tensors.
            ending: what is done with the gradients.

        Raises:
            RequestError: ranks were given different batches, or gradients that wait were cleared.
        """
        if self._gathered is not None and self._kept is not None:
            self._kept.refuse_cleared()
        samples = sum(piece.shape.samples for piece in pieces)
        before = self._gathered or Gathered(samples, 0.0, self._loss_scale.now() if self._loss_scale else None)
        counted = self._counted(prepared)
        size = 1.0 if counted else samples / before.samples
        inputs = self._inputs(prepared, pieces, index, size, before.scale)
        results = BatchResults(prepared, pieces, self._plan.microbatches, self._team, self._workers, agreement)

        def before_end(device: int, record: StepRecord) -> None:
            shared = results.announce(device, record)
            if ending is not Ending.KEEP:
                executor = self._workers.executor(device)
                differ = agreement.differ()
                divisor, scales, refused = self._divisor(prepared, device, shared, before, size, differ)
                executor.finish_reductions()
                executor.update.begin(divisor, before.scale, scales, refused)

        def after(device: int) -> None:
            results.collect(device)
            replicas = self._team.replicas_of(device)
            if replicas is not None:
                share(self._written_buffers(prepared, device), replicas)

        try:
            records, clocked = self._workers.run(prepared, inputs, Order(ending, trace, watch), before_end, after)
            agreement.refuse(self._outcome(ending))
        except BaseException:
            self._gathered = None
            self._variants.forget()  # the mail of a step that broke off is no start for the next
            raise
        here = math.fsum(row[1] for row in results.own) if counted else size
        self._keep(ending, Gathered(before.samples, before.divisor + here, before.scale))
        if ending is not Ending.REDUCE:
            results.say()
        update = self._workers.update(self._team.local[0])
        return StepResult(*results.loss_and_metrics(), records, prepared.plan, update.norm, update.overflow, clocked)

    def _outcome(self, ending: Ending) -> str:
        """What becomes of a step that is refused at its end."""
        on_host = all(queue.device.type == "cpu" for queue in self._workers.queues.values())
        if ending is Ending.STEP and not on_host:
            return "the update was made with them: go on from a checkpoint"
        return "no parameter was updated, and gradients that waited for an update are dropped"

    def _keep(self, ending: Ending, gathered: Gathered) -> None:
        """Keep what later steps need to know of one that ended so, with these batches."""
        self._gathered = gathered if ending is Ending.KEEP else None
        self._kept = KeptGradients(self._states) if ending is Ending.KEEP else None
        if self._loss_scale is not None and ending is Ending.STEP:
            self._loss_scale.settle(self._workers.update(self._team.local[0]).overflow)

    def _counted(self, prepared: Prepared) -> bool:
        """Whether gradients are sums by weights as they are, the step's own or samples over replicas, and no shares."""
        return prepared.weighted or self._team.replicas > 1

    def _divisor(
        self, prepared: Prepared, device: int, shared: SharedResults, before: Gathered, size: float,
        differ: bool,
    ) -> tuple[Tensor | float, tuple[Tensor, int] | None, bool]:  # fmt: skip
        """What makes the mean of gradients that are summed up; the sum of the replicas' scales and the number of
        replicas; and whether no stage of any replica steps.

        Args:
            prepared: the step.
            device: that asks.
            shared: its results, announced.
            before: the batches that wait for this one.
            size: of this batch, where weights are shares.
            differ: whether the ranks of this replica have different batches.
        """
        if not self._counted(prepared):
            return before.divisor + size, None, differ
        # A weighted mean's sum of weights is known when the last microbatch is through.
        total = shared.total_weight(prepared.weight_dtype)
        if before.divisor:
            total = before.divisor + (total.double() if isinstance(total, Tensor) else total)
        replicas = self._team.replicas_of(device)
        if replicas is None:
            return total, None, differ
        queue = self._workers.queues[device]
        summed, scales, apart = totals_of_all([total, before.scale or 0.0, float(differ)], replicas, queue)
        mean: Tensor = summed / (1 if prepared.weighted else self._samples())
        refused = queue.device.type == "cpu" and bool(apart)
        return mean, None if before.scale is None else (scales, replicas.devices), refused

    def _inputs(
        self, prepared: Prepared, pieces: list[Microbatch], index: int, size: float, scale: float | None
    ) -> StepInputs:
        first = self._team.replica * self._plan.microbatches
        keys = prepared.keys(self.seed, index, first)
        weights = [row[1] for row in prepared.parts]
        samples = self._samples()
        shares = [
            weight if isinstance(weight, float) else weight_of(piece, self._team.replicas) / samples
            for weight, piece in zip(weights, pieces, strict=True)
        ]
        seeds = torch.tensor(shares, dtype=prepared.loss_dtype)
        if size != 1:
            seeds *= size
        factor = None if scale is None else torch.tensor(scale, dtype=prepared.loss_dtype)
        if factor is not None:
            seeds *= factor
        return StepInputs(pieces, keys, seeds, prepared.weights, factor, fresh=self._gathered is None)

    def _samples(self) -> float:
        """What weights are shares of: with replicas the samples that a step has if all microbatches are the largest.

        A number that all know without a word; what it is off by is made good when the gradients are summed.
        """
        if self._team.replicas == 1:
            return 1.0
        return float(self._team.replicas * self._plan.microbatches * self._largest)

    def _written_buffers(self, prepared: Prepared, device: int) -> list[Tensor]:
        """The buffers that stages of a device write."""
        written = prepared.compiled[0].operators.step.mutated_buffers
        states = [self._states[stage.index] for stage in self._plan.stages_on(device)]
        return [buffer for state in states for name, buffer in state.buffers.items() if name in written]
