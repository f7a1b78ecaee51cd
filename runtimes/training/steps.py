"""One training step over the devices of this process."""

import math

import torch
from attrs import frozen
from torch import Tensor

from ..batch.microbatches import Microbatch
from ..engine.prepared import Prepared
from ..engine.result_parts import WEIGHT
from ..engine.results import weight_of
from ..engine.step_data import StepInputs, StepOptions
from ..engine.workers import Workers
from ..optimizer.replicas import share, totals_of_all
from ..optimizer.training import Training
from ..optimizer.update import Ending, Update
from .batch_run import BatchResult, BatchRun
from .kept_gradients import KeptGradients
from .local_stages import LocalStages
from .variants import Variants


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

    def batch(self, pieces: list[Microbatch]) -> BatchRun:
        """A batch ready for a step.

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
            RequestError: ranks were given different batches, or gradients that wait were cleared.
            WorkerError: a worker stopped.
        """
        if self._gathered is not None and self._kept is not None:
            self._kept.refuse_cleared()
        prepared, ending = batch.prepared, options.ending
        samples = sum(piece.shape.samples for piece in batch.pieces)
        before = self._gathered or Gathered(samples, 0.0, self._loss_scale.now() if self._loss_scale else None)
        counted = self._counted(prepared)
        size = 1.0 if counted else samples / before.samples

        def before_end(device: int) -> None:
            if ending is not Ending.KEEP:
                executor = self._workers.executor(device)
                divisor, scales, refused = self._divisor(batch, device, before, size)
                executor.finish_reductions()
                executor.update.begin(divisor, before.scale, scales, refused)

        def after(device: int) -> None:
            replicas = self._team.replicas_of(device)
            if replicas is not None:
                share(self._written_buffers(prepared, device), replicas)

        inputs = self._inputs(batch, index, size, before.scale)
        try:
            done = batch.run(inputs, options, self._outcome(ending), before_end, after)
        except BaseException:
            self._gathered = None
            raise
        here = math.fsum(row[WEIGHT] for row in batch.results.own) if counted else size
        self._keep(ending, Gathered(before.samples, before.divisor + here, before.scale))
        if ending is not Ending.REDUCE:
            batch.results.print_text()
        return done

    @property
    def norm(self) -> Tensor | None:
        """The global norm of the last update's gradients, before clipping, where it was asked for."""
        return self._update.norm

    @property
    def skipped(self) -> bool:
        """Whether the last update was, because a gradient was not finite."""
        return self._update.overflow

    @property
    def _update(self) -> Update:
        return self._workers.update(self._team.local[0])

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
            self._loss_scale.settle(self.skipped)

    def _counted(self, prepared: Prepared) -> bool:
        """Whether gradients are sums by weights as they are, the step's own or samples over replicas, and no shares."""
        return prepared.weighted or self._team.replicas > 1

    def _divisor(
        self, batch: BatchRun, device: int, before: Gathered, size: float
    ) -> tuple[Tensor | float, tuple[Tensor, int] | None, bool]:
        """What makes the mean of gradients that are summed up; the sum of the replicas' scales and the number of
        replicas; and whether no stage of any replica steps.

        Args:
            batch: that runs, its results announced.
            device: that asks.
            before: the batches that wait for this one.
            size: of this batch, where weights are shares.
        """
        differ = batch.agreement.differ()
        if not self._counted(batch.prepared):
            return before.divisor + size, None, differ
        # A weighted mean's sum of weights is known when the last microbatch is through.
        total = batch.results.total_weight(device)
        if before.divisor:
            total = before.divisor + (total.double() if isinstance(total, Tensor) else total)
        replicas = self._team.replicas_of(device)
        if replicas is None:
            return total, None, differ
        queue = self._workers.queues[device]
        summed, scales, apart = totals_of_all([total, before.scale or 0.0, float(differ)], replicas, queue)
        mean: Tensor = summed / (1 if batch.prepared.weighted else self._samples())
        refused = queue.device.type == "cpu" and bool(apart)
        return mean, None if before.scale is None else (scales, replicas.devices), refused

    def _inputs(self, batch: BatchRun, index: int, size: float, scale: float | None) -> StepInputs:
        prepared, pieces = batch.prepared, batch.pieces
        first = self._team.replica * self._plan.microbatches
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
        return StepInputs(pieces, keys, seeds, prepared.weights, factor, clear_gradients=self._gathered is None)

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
