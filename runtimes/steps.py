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
from .replicas import Rows, rows_of_all, share, total_of_all
from .results import SharedResults
from .state import StageState
from .team import Team
from .tied import TiedReduction


@frozen
class StepResult:
    """What a step gave.

    Args:
        loss: the mean over the batch.
        metrics: the other parts of the step's result, likewise.
        records: device of this process → what it did.
        plan: that ran: the pipeline's, or for other microbatches one derived from it.
        trace: of the clock that the devices ran under, if they did.
    """

    loss: Tensor
    metrics: dict[str, float]
    records: dict[int, StepRecord]
    plan: Plan
    trace: Trace | None = None


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
        clock: that the devices run under, all of them in this process; None where time is time.
    """

    def __init__(
        self, plan: Plan, preparations: Preparations, states: Mapping[int, StageState], team: Team,
        where: Mapping[int, torch.device], seed: int, largest: int, clock: Clock | None = None,
    ) -> None:  # fmt: skip
        self._clock = clock
        self._plan, self._preparations, self._states, self._team = plan, preparations, states, team
        self._seed, self._largest = seed, largest
        self._queues = {local: compute_queue(where[local], local) for local in team.local}
        self._executors: dict[int, Executor] = {}

    def run(
        self, prepared: Prepared, pieces: list[Microbatch], index: int, trace: bool, watch: bool, update: bool
    ) -> StepResult:  # fmt: skip
        """Run one step.

        Args:
            prepared: for these microbatches.
            pieces: the microbatches.
            index: number of the step, for random numbers.
            trace: record every action.
            watch: record the saved tensors.
            update: step the optimizers.
        """
        inputs = self._inputs(prepared, pieces, index)
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
                if prepared.weighted or replicas is not None:
                    # A weighted mean's sum of weights is known when the last microbatch is through.
                    total = shared.total_weight(prepared.weight_dtype)
                    if replicas is not None:
                        total = total_of_all(total, replicas, queue) / (1 if prepared.weighted else self._samples())
                    executor.finish_reductions()
                    for stage in self._plan.stages_on(device):
                        self._states[stage.index].divide_gradients(total)

            with queue.active():
                bound = self._bound(prepared, device)
                if device in begun:
                    record = begun[device]
                    executor.end(bound, record, update=update, before_update=before_update)
                else:
                    record = executor.run(
                        bound, inputs, trace=trace, watch=watch, update=update, before_update=before_update
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
            self._preparations.forget()  # the mail of a step that broke off is no start for the next
            raise
        table = rows[self._team.local[0]]
        if self._team.replicas > 1 and not prepared.weighted:
            table = _with_shares(table)
        if update and 0 in self._team.local:
            _say(prepared, own[0])
        loss, _ = _mean(prepared, table)
        return StepResult(loss, _metrics(prepared, table), records, prepared.plan, clocked)

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

    def _inputs(self, prepared: Prepared, pieces: list[Microbatch], index: int) -> StepInputs:
        one = random_key(self._seed, index, 0)
        first = self._team.replica * self._plan.microbatches
        keys = [random_key(self._seed, index, first + m) if prepared.random else one for m in range(len(pieces))]
        weights = [row[1] for row in prepared.parts]
        samples = self._samples()
        shares = [
            weight if isinstance(weight, float) else self._weight(piece) / samples
            for weight, piece in zip(weights, pieces, strict=True)
        ]
        return StepInputs(pieces, keys, torch.tensor(shares, dtype=prepared.loss_dtype), prepared.weights)

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
            replicas = self._team.replicas_of(device)
            self._executors[device] = Executor(self._plan, backend, self._queues[device], reduction, replicas)
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
