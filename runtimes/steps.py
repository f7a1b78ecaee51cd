"""One training step over the devices of this process."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor, nn

from ..core.capture.randomness import random_key
from ..core.plan import Plan
from ..core.trace import MemorySample, Trace
from .clocked import Clock, ClockedWalk, one_thread
from .compute import compute_queue
from .executor import Bound, Executor, StepInputs, StepRecord
from .losses import mean_loss
from .microbatches import Microbatch
from .prepared import Preparations, Prepared
from .replicas import Rows, rows_of_all, share, totals_of_all
from .results import SharedResults
from .scaling import check_agreed
from .state import StageState
from .team import Team
from .tied import TiedReduction
from .training import Training
from .update import Census, Ending, Update


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
        plan: where stages are, and what is tied.
        preparations: what a step needs, by the shapes of its microbatches.
        states: stage index → what this process keeps of it.
        team: the devices.
        where: device of this process → the device that its tensors are on.
        seed: of all random numbers.
        largest: samples of the largest microbatch of the example.
        training: what happens in an update beside the optimizers' steps.
        census: whose norms make the global norm.
        clock: that the devices run under, all of them in this process; None where time is time.
    """

    def __init__(
        self, plan: Plan, preparations: Preparations, states: Mapping[int, StageState], team: Team,
        where: Mapping[int, torch.device], seed: int, largest: int, training: Training, census: Census,
        clock: Clock | None = None,
    ) -> None:  # fmt: skip
        self._training, self._census, self._loss_scale = training, census, training.loss_scale()
        self._gathered: Gathered | None = None
        self._clock = clock
        self._plan, self._preparations, self._states, self._team = plan, preparations, states, team
        self._seed, self._largest = seed, largest
        self._queues = {local: compute_queue(where[local], local) for local in team.local}
        self._executors: dict[int, Executor] = {}

    def run(
        self, prepared: Prepared, pieces: list[Microbatch], index: int, trace: bool, watch: bool, ending: Ending
    ) -> StepResult:  # fmt: skip
        """Run one step.

        Args:
            prepared: for these microbatches.
            pieces: the microbatches.
            index: number of the step, for random numbers.
            trace: record every action.
            watch: record the saved tensors.
            ending: what is done with the gradients.
        """
        samples = sum(piece.shape.samples for piece in pieces)
        before = self._gathered or Gathered(samples, 0.0, self._loss_scale.now() if self._loss_scale else None)
        counted = self._counted(prepared)
        size = 1.0 if counted else samples / before.samples
        inputs = self._inputs(prepared, pieces, index, size, before.scale)
        parts = [
            [self._weight(piece) if part is None else part for part in row]
            for row, piece in zip(prepared.parts, pieces, strict=True)
        ]
        rows: dict[int, Rows] = {}
        own: dict[int, Rows] = {}  # of this replica

        def work(device: int) -> StepRecord:
            executor, replicas = self._executor(device), self._team.replicas_of(device)
            queue = self._queues[device]
            shared = SharedResults(parts, executor.backend, queue)

            def before_update(record: StepRecord) -> None:
                shared.announce(record)
                if ending is not Ending.KEEP:
                    divisor = self._divisor(prepared, device, shared, before, size)
                    executor.finish_reductions()
                    executor.update.begin(divisor, before.scale)

            with queue.active():
                bound = self._bound(prepared, device)
                if device in begun:
                    record = begun[device]
                    executor.end(bound, record, ending=ending, before_update=before_update)
                else:
                    record = executor.run(
                        bound, inputs, trace=trace, watch=watch, ending=ending, before_update=before_update
                    )
                own[device] = rows[device] = shared.collect()
                if replicas is not None:
                    columns = 2 + len(prepared.metrics)
                    rows[device] = rows_of_all(own[device], replicas, self._plan.microbatches, columns, queue.device)
                    share(self._written_buffers(prepared, device), replicas)
            record.results.clear()
            return record

        begun: dict[int, StepRecord] = {}
        clocked: Trace | None = None
        try:
            for queue in self._queues.values():
                queue.begin(trace)
            if self._clock is not None:
                begun, clocked = self._compute_under(self._clock, prepared, inputs)
            records = self._team.run_local(work)
            for queue in self._queues.values():
                queue.end()
        except BaseException:
            self._gathered = None
            self._preparations.forget()  # the mail of a step that broke off is no start for the next
            raise
        first = self._team.local[0]
        here = math.fsum(row[1] for row in own[first]) if counted else size
        self._keep(ending, Gathered(before.samples, before.divisor + here, before.scale))
        if ending is not Ending.REDUCE and 0 in self._team.local:
            _say(prepared, own[0])
        return self._result(prepared, rows[first], records, clocked)

    def _result(
        self, prepared: Prepared, rows: Rows, records: dict[int, StepRecord], clocked: Trace | None
    ) -> StepResult:
        table = _with_shares(rows) if self._team.replicas > 1 and not prepared.weighted else rows
        update = self._executors[self._team.local[0]].update
        return StepResult(
            _mean(prepared, table)[0], _metrics(prepared, table), records, prepared.plan,
            update.norm, update.overflow, clocked,
        )  # fmt: skip

    def _keep(self, ending: Ending, gathered: Gathered) -> None:
        """Keep what later steps need to know of one that ended so, with these batches."""
        self._gathered = gathered if ending is Ending.KEEP else None
        if self._loss_scale is not None and ending is Ending.STEP:
            self._loss_scale.settle(self._executors[self._team.local[0]].update.overflow)

    def _counted(self, prepared: Prepared) -> bool:
        """Whether gradients are sums by weights as they are, the step's own or samples over replicas, and no shares."""
        return prepared.weighted or self._team.replicas > 1

    def _divisor(
        self, prepared: Prepared, device: int, shared: SharedResults, before: Gathered, size: float
    ) -> Tensor | float:
        """What makes the mean of gradients that are summed up.

        Args:
            prepared: the step.
            device: that asks.
            shared: its results, announced.
            before: the batches that wait for this one.
            size: of this batch, where weights are shares.
        """
        if not self._counted(prepared):
            return before.divisor + size
        # A weighted mean's sum of weights is known when the last microbatch is through.
        total = shared.total_weight(prepared.weight_dtype)
        if before.divisor:
            total = before.divisor + (total.double() if isinstance(total, Tensor) else total)
        replicas = self._team.replicas_of(device)
        if replicas is None:
            return total
        scale = before.scale or 0.0
        summed: Tensor
        summed, scales = totals_of_all([total, scale], replicas, self._queues[device])
        if scale:
            check_agreed(scales.item(), scale, replicas.devices)
        return summed / (1 if prepared.weighted else self._samples())

    def _compute_under(
        self, clock: Clock, prepared: Prepared, inputs: StepInputs
    ) -> tuple[dict[int, StepRecord], Trace]:
        """Everything up to the reductions and optimizer steps, on all devices, under a clock.

        Returns:
            What each device did, and the clock's trace, with the saved tensors as they were alive.
        """
        bound = {device: self._bound(prepared, device) for device in self._team.local}
        walk = ClockedWalk(prepared.plan, bound)
        records = {
            device: self._executor(device).begin(each, inputs, lambda: walk.now_s, walk.exchange.transport(device))
            for device, each in bound.items()
        }
        with one_thread():
            trace = clock(prepared.plan, walk.perform)
        walk.check_done()
        memory = [
            MemorySample(device, at_s, "saved", alive)
            for device, record in records.items()
            for at_s, alive in record.memory
        ]
        return records, evolve(trace, memory=tuple(sorted(memory, key=lambda sample: sample.time_s)))

    def _bound(self, prepared: Prepared, device: int) -> Bound:
        """A device's instructions for these microbatches."""
        if device not in prepared.bound:
            executor = self._executor(device)
            prepared.bound[device] = executor.bind(prepared.plan, prepared.lowered, prepared.runs[device])
        return prepared.bound[device]

    def _inputs(
        self, prepared: Prepared, pieces: list[Microbatch], index: int, size: float, scale: float | None
    ) -> StepInputs:
        one = random_key(self._seed, index, 0)
        first = self._team.replica * self._plan.microbatches
        keys = [random_key(self._seed, index, first + m) if prepared.random else one for m in range(len(pieces))]
        weights = [row[1] for row in prepared.parts]
        samples = self._samples()
        shares = [
            weight if isinstance(weight, float) else self._weight(piece) / samples
            for weight, piece in zip(weights, pieces, strict=True)
        ]
        seeds = torch.tensor(shares, dtype=prepared.loss_dtype)
        if size != 1:
            seeds *= size
        factor = None if scale is None else torch.tensor(scale, dtype=prepared.loss_dtype)
        if factor is not None:
            seeds *= factor
        return StepInputs(pieces, keys, seeds, prepared.weights, factor, fresh=self._gathered is None)

    def _weight(self, piece: Microbatch) -> float:
        """How much a microbatch counts, where the step does not say: its share of a batch, or over replicas, which may
        have batches of other sizes, its samples."""
        return piece.weight if self._team.replicas == 1 else float(piece.samples)

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

    def _executor(self, device: int) -> Executor:
        """The device's executor, at the transport's end that is open now."""
        backend = self._team.backend(device)
        if device not in self._executors:
            tied = {w.name for w in self._plan.tied}
            copies: dict[tuple[int, str], nn.Parameter] = {
                (i, name): p for i, s in self._states.items() for name, p in s.parameters.items() if name in tied
            }
            reduction = TiedReduction(self._plan, copies)
            own = {stage.index: self._states[stage.index] for stage in self._plan.stages_on(device)}
            update = Update(self._plan, own, self._census, self._training.clip_norm, self._queues[device].device)
            self._executors[device] = Executor(
                self._plan, backend, self._queues[device], reduction, update, self._team.replicas_of(device)
            )
        self._executors[device].backend = backend
        return self._executors[device]


def _with_shares(rows: Rows) -> Rows:
    """The rows with shares of all samples as their weights, which were samples."""
    total = math.fsum(row[1] for row in rows)
    return [[row[0], row[1] / total, *row[2:]] for row in rows]


def _mean(prepared: Prepared, rows: list[list[float]]) -> tuple[Tensor, Any]:
    """The loss, and the sum of the weights: by the numbers that every device has, in the dtypes that they had."""
    losses = [torch.tensor(row[0], dtype=prepared.loss_dtype) for row in rows]
    dtype = prepared.weight_dtype
    weights = [row[1] if dtype is None else torch.tensor(row[1], dtype=dtype) for row in rows]
    return mean_loss(losses, weights, prepared.weighted)


def _say(prepared: Prepared, rows: list[list[float]]) -> None:
    """Print and log what the step prints and logs, microbatch by microbatch."""
    for compiled, row in zip(prepared.compiled, rows, strict=True):
        compiled.operators.step.outputs.printed.say(row[2 + len(prepared.metrics) :])


def _metrics(prepared: Prepared, rows: list[list[float]]) -> dict[str, float]:
    total = math.fsum(row[1] for row in rows)
    return {name: sum(row[2 + i] * row[1] for row in rows) / total for i, name in enumerate(prepared.metrics)}
