"""One training step on the devices of this process, and the accumulation of gradients over several batches."""

import math

import torch
from attrs import frozen
from torch import Tensor

from ...core.errors import RequestError
from ..batch.batch_agreement import NOT_UPDATED
from ..batch.microbatches import Microbatch
from ..engine.prepared import Prepared
from ..engine.result_parts import WEIGHT
from ..engine.results import weight_of
from ..engine.step_data import StepInputs, StepOptions
from ..engine.workers import Workers
from ..lazy_value import LazyValue
from ..optimizer.replica_values import broadcast_from_first, sum_over_replicas
from ..optimizer.training import Training
from ..optimizer.update import Ending, NonFiniteNorm, StartRead, Update
from .batch_run import BatchResult, BatchRun
from .kept_gradients import KeptGradients
from .local_stages import LocalStages
from .value_variants import Variants


@frozen
class Accumulated:
    """Batches whose gradients are accumulated for a later update.

    Args:
        samples: of the first batch; the sizes of the others are relative to it.
        divisor: divisor of the accumulated gradients: the sum of the step's weights, or of the relative sizes of the
            batches.
        scale: the factor on all their losses, fixed when the first batch ran; None for 1.
        finite: whether all their losses are finite, if updates depend on it.
    """

    samples: int
    divisor: float
    scale: float | None
    finite: bool = True


class StepRunner:
    """Runs training steps.

    Args:
        stages: the stages of this process.
        variants: the prepared steps.
        workers: the devices of this process.
        training: clipping, scaling and seed.
        largest: samples of the largest microbatch of the example.

    Attributes:
        seed: of all random numbers.
    """

    def __init__(
        self,
        stages: LocalStages,
        variants: Variants,
        workers: Workers,
        training: Training,
        largest: int,
    ) -> None:
        self._loss_scale = training.loss_scale()
        self._needs_finite_loss, self._stopped = training.needs_finite_loss, False
        self._accumulated: Accumulated | None = None
        self._kept: KeptGradients | None = None
        self._workers = workers
        self._plan, self._states, self._team, self._variants = stages.plan, stages.states, stages.team, variants
        self.seed, self._largest = training.seed, largest

    @property
    def accumulating(self) -> bool:
        """Whether gradients are accumulated for a later update."""
        return self._accumulated is not None

    def drop_accumulated(self) -> None:
        """Drop accumulated gradients: the next step clears them."""
        self._accumulated = None

    def batch(self, pieces: list[Microbatch]) -> BatchRun:
        """A batch that is ready for a step.

        Args:
            pieces: the batch's microbatches.

        Raises:
            RequestError: the step cannot be captured, or the plan cannot run it, or another rank has another batch.
        """
        return BatchRun(self._variants, pieces, self._plan.microbatches, self._team, self._workers)

    def run(self, batch: BatchRun, index: int, options: StepOptions) -> BatchResult:
        """Run one step.

        Args:
            batch: of `batch`.
            index: number of the step, for random numbers.
            options: how it runs.

        Raises:
            RequestError: ranks were given different batches, or accumulated gradients were cleared.
            WorkerError: a worker stopped.
        """
        if self._accumulated is not None and self._kept is not None:
            try:
                self._kept.refuse_cleared()
            except RequestError:
                self.drop_accumulated()
                raise
        prepared, ending = batch.prepared, options.ending
        samples = sum(piece.shape.samples for piece in batch.pieces)
        before = self._accumulated or Accumulated(samples, 0.0, self._loss_scale.now() if self._loss_scale else None)
        counted = self._counted(prepared)
        size = 1.0 if counted else samples / before.samples

        def before_end(device: int) -> None:
            executor = self._workers.executor(device)
            if ending is not Ending.KEEP:
                divisor, scales, refused = self._divisor(batch, device, before, size)
                executor.finish_reductions()
                if self._needs_finite_loss and not (batch.results.loss_is_finite(device) and before.finite):
                    refused = True
                executor.update.begin(divisor, before.scale, scales, refused)

        def after(device: int) -> None:
            replicas = self._team.replicas_of(device)
            if replicas is not None:
                broadcast_from_first(self._written_buffers(prepared, device), replicas)

        inputs = self._inputs(batch, index, size, before.scale)
        try:
            done = batch.run(inputs, options, self.outcome(ending), before_end, after)
        except BaseException:
            self._accumulated = None
            raise
        keeps = ending is Ending.KEEP
        here = math.fsum(row[WEIGHT] for row in batch.results.own) if counted and keeps else size
        assert done.loss is not None
        finite = before.finite and (not self._needs_finite_loss or bool(torch.isfinite(done.loss)))
        self._stopped = not finite
        self._keep(ending, Accumulated(before.samples, before.divisor + here, before.scale, finite))
        return done

    @property
    def norm(self) -> Tensor | None:
        """The global norm of the last update's gradients, before clipping; None without ``clip_norm``."""
        return self._update.norm

    def non_finite_norm(self, start_read: StartRead) -> LazyValue[NonFiniteNorm | None]:
        """The global norm of the last update's gradients if it is not finite; see `Update.non_finite_norm`."""
        return self._update.non_finite_norm(start_read)

    @property
    def skipped(self) -> bool:
        """Whether the last update was skipped because a gradient or the loss was not finite."""
        return self._stopped or self._update.overflow

    @property
    def _update(self) -> Update:
        return self._workers.update(self._team.local[0])

    def outcome(self, ending: Ending) -> str:
        """The state of the model after a step that is refused at its end, for the message."""
        if ending is Ending.STEP and any(queue.runs_ahead for queue in self._workers.queues.values()):
            return "updates were made with them: go on from a checkpoint"
        return NOT_UPDATED

    def _keep(self, ending: Ending, accumulated: Accumulated) -> None:
        """Record accumulated batches, and update the loss scale, after a step with this ending."""
        self._accumulated = accumulated if ending is Ending.KEEP else None
        self._kept = KeptGradients(self._states) if ending is Ending.KEEP else None
        if self._loss_scale is not None and ending is Ending.STEP:
            self._loss_scale.update(self._update.overflow)

    def _counted(self, prepared: Prepared) -> bool:
        """Whether microbatches count by absolute weights: the step's own, or samples with replicas; else by shares."""
        return prepared.weighted or self._team.replicas > 1

    def _divisor(
        self, batch: BatchRun, device: int, before: Accumulated, size: float
    ) -> tuple[Tensor | float, tuple[Tensor, int] | None, bool]:
        """What the update of the accumulated gradients needs.

        Args:
            batch: the current batch, whose results were sent.
            device: the device.
            before: the batches accumulated before.
            size: relative size of this batch, if weights are shares.

        Returns:
            The divisor of the gradients; the sum of the replicas' loss scales and the number of replicas; and whether
            the update is refused on all replicas.
        """
        differ = batch.agreement.differ()
        if not self._counted(batch.prepared):
            return before.divisor + size, None, differ
        # The sum of computed weights is known after the last microbatch.
        total = batch.results.total_weight(device)
        if before.divisor:
            total = before.divisor + (total.double() if isinstance(total, Tensor) else total)
        replicas = self._team.replicas_of(device)
        if replicas is None:
            return total, None, differ
        queue = self._workers.queues[device]
        summed, scales, apart = sum_over_replicas([total, before.scale or 0.0, float(differ)], replicas, queue)
        mean: Tensor = summed / (1 if batch.prepared.weighted else self._samples())
        refused = not queue.runs_ahead and bool(apart)
        return mean, None if before.scale is None else (scales, replicas.devices), refused

    def _inputs(self, batch: BatchRun, index: int, size: float, scale: float | None) -> StepInputs:
        prepared, pieces = batch.prepared, batch.pieces
        first = self._team.batch * self._plan.microbatches
        if self._team.tensor is not None:
            self._team.tensor.check(prepared.compiled)
        keys = prepared.keys(self.seed, index, first)
        weights = [row[WEIGHT] for row in prepared.parts]
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
        return StepInputs(pieces, keys, seeds, prepared.weights, factor, clear_gradients=self._accumulated is None)

    def _samples(self) -> float:
        """The total that weights are divided by: with replicas the samples of a step with the largest microbatches.

        All ranks know this number without communication. The division by the real total follows in the update.
        """
        if self._team.replicas == 1:
            return 1.0
        return float(self._team.replicas * self._plan.microbatches * self._largest)

    def _written_buffers(self, prepared: Prepared, device: int) -> list[Tensor]:
        """The buffers that the stages of a device write."""
        written = prepared.compiled[0].operators.step.mutated_buffers
        states = [self._states[stage.index] for stage in self._plan.stages_on(device)]
        return [buffer for state in states for name, buffer in state.buffers.items() if name in written]
