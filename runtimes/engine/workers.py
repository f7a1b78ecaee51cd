"""The devices of this process at work: each has a queue and an executor, and all run one prepared step together."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from attrs import evolve, frozen
from torch import nn

from ...core.plan.plan import Plan
from ...core.trace.trace import MemorySample, Trace
from ..devices.compute import compute_queue
from ..launch.team import Team
from ..optimizer.state import StageState
from ..optimizer.training import Training
from ..optimizer.update import Ending, NormParameters, Update
from .clocked import Clock, ClockedWalk, one_thread
from .executor import Bound, Executor, StepInputs, StepRecord
from .prepared import Prepared
from .tied import TiedReduction


@frozen
class Order:
    """How a prepared step is run.

    Args:
        ending: what is done with the gradients.
        trace: whether every action is recorded.
        watch: whether the saved tensors are.
    """

    ending: Ending
    trace: bool = False
    watch: bool = False


class Workers:
    """The devices of this process.

    Args:
        plan: where stages are, and what is tied.
        states: stage index → what this process keeps of it.
        team: the devices.
        where: device of this process → the device that its tensors are on.
        training: what happens in an update beside the optimizers' steps.
        norm_parameters: whose norms make the global norm.
        clock: that the devices run under, all of them in this process; None where time is time.

    Attributes:
        queues: device of this process → where it computes.
    """

    def __init__(
        self,
        plan: Plan,
        states: Mapping[int, StageState],
        team: Team,
        where: Mapping[int, torch.device],
        training: Training,
        norm_parameters: NormParameters,
        clock: Clock | None = None,
    ) -> None:
        self._plan, self._states, self._team, self._clock = plan, states, team, clock
        self._training, self._norm_parameters = training, norm_parameters
        self.queues = {local: compute_queue(where[local], local) for local in team.local}
        self._executors: dict[int, Executor] = {}

    def run(
        self,
        prepared: Prepared,
        inputs: StepInputs,
        order: Order,
        before_end: Callable[[int, StepRecord], None],
        after: Callable[[int], None],
    ) -> tuple[dict[int, StepRecord], Trace | None]:
        """Run a step on all devices of this process, each on a thread of its own if there are several.

        Args:
            prepared: what they run.
            inputs: what it works on.
            order: how.
            before_end: called on each device, with what it did, between its last compute action and the first reduction
                or optimizer step.
            after: called on each behind the last action.

        Returns:
            What each did, and the trace of the clock that they ran under, if they did.
        """
        begun: dict[int, StepRecord] = {}
        clocked: Trace | None = None

        def work(device: int) -> StepRecord:
            executor, ending = self.executor(device), order.ending
            before_update = partial(before_end, device)
            with self.queues[device].active():
                bound = self._bound(prepared, device)
                if device in begun:
                    record = begun[device]
                    executor.end(bound, record, ending=ending, before_update=before_update)
                else:
                    record = executor.run(
                        bound, inputs, trace=order.trace, watch=order.watch, ending=ending, before_update=before_update
                    )
                after(device)
            record.results.clear()
            return record

        for queue in self.queues.values():
            queue.begin(order.trace)
        if self._clock is not None:
            begun, clocked = self._compute_under(self._clock, prepared, inputs)
        records = self._team.run_local(work)
        for queue in self.queues.values():
            queue.end()
        return records, clocked

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
            device: self.executor(device).begin(each, inputs, lambda: walk.now_s, walk.exchange.transport(device))
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
            # A clock says when a message has arrived, and its sender lets go of it then.
            ahead_limit = prepared.ahead_limit if self._clock is None else None
            prepared.bound[device] = self.executor(device).bind(
                prepared.plan, prepared.lowered, prepared.runs[device], ahead_limit
            )
        return prepared.bound[device]

    def update(self, device: int) -> Update:
        """The device's part of the update."""
        return self._executors[device].update

    def executor(self, device: int) -> Executor:
        """The device's executor, at the transport's end that is open now."""
        backend = self._team.backend(device)
        if device not in self._executors:
            tied = {w.name for w in self._plan.tied}
            copies: dict[tuple[int, str], nn.Parameter] = {
                (i, name): p for i, s in self._states.items() for name, p in s.parameters.items() if name in tied
            }
            reduction = TiedReduction(self._plan, copies)
            own = {stage.index: self._states[stage.index] for stage in self._plan.stages_on(device)}
            update = Update(
                self._plan, own, self._norm_parameters, self._training.clip_norm, self.queues[device].device
            )
            self._executors[device] = Executor(
                self._plan, backend, self.queues[device], reduction, update, self._team.replicas_of(device)
            )
        self._executors[device].backend = backend
        return self._executors[device]
