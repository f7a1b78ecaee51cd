"""The devices of this process: each has a compute queue and an executor, and together they run a batch."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from threading import Barrier

import torch
from attrs import define, field

from ...core.logs import set_thread
from ...core.lowering.queues import sending_pairs
from ...core.plan.plan import Plan
from ...core.trace.trace import Trace
from ..devices.compute import ComputeQueue, compute_queue
from ..launch.team import Team
from ..offload.device_offload import DeviceOffload
from ..programs.stage_run import Stages
from ..update.stage_state import StageState
from ..update.training import Training
from ..update.update import NormParameters, Update
from .executor import BoundActions, Executor, Graphs
from .prepared import Prepared
from .results import Batch
from .step_data import StepInputs, StepOptions, StepRecord

Clock = Callable[[Plan], Trace]
"""The trace of a step of a plan on devices that this machine does not have; a simulator is a clock."""


@define(eq=False)
class Workers:
    """The devices of this process.

    Args:
        clock: the times of virtual devices; None for real ones.
        graphs: torch device → what creates the captured graphs there; None for nothing.

    Attributes:
        queues: device of this process → its compute queue.
    """

    plan: Plan
    states: Mapping[int, StageState]
    team: Team
    training: Training
    norm_parameters: NormParameters
    clock: Clock | None
    offload: Mapping[int, DeviceOffload]
    graphs: Callable[[torch.device], Callable[[Stages], Graphs]] | None
    queues: dict[int, ComputeQueue] = field(init=False)
    _executors: dict[int, Executor] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.queues = {local: compute_queue(self.team.where[local], local) for local in self.team.local}
        for device, activity in self.team.activities.items():
            activity.stages = tuple(stage.index for stage in self.plan.stages_on(device))

    def run(
        self,
        batch: Batch,
        inputs: StepInputs,
        options: StepOptions,
        outcome: str,
        before_update: Callable[[int], None] | None = None,
        after: Callable[[int], None] | None = None,
    ) -> None:
        """Run a batch on all devices of this process, each on its own thread if there are several.

        Args:
            batch: its records and its trace are set.
            outcome: the state of the model if the batch is refused at its end, for the message.
            before_update: called on each device between its last compute action and the first reduction or optimizer
                step, after its results were sent.
            after: called on each device after its last action, when it has all results.

        Raises:
            RequestError: ranks were given different batches. If the host would wait for the device to know it
                (``agreement.waits``), the caller asks later: ``agreement.refuse``.
            WorkerError: a worker stopped.
        """
        prepared = batch.prepared
        ready = Barrier(len(self.queues)) if self.graphs is not None and not prepared.bound else None

        def work(device: int) -> StepRecord:
            def end(record: StepRecord) -> None:
                batch.start_exchange(device, record)
                if before_update is not None:
                    before_update(device)

            set_thread(stage.index for stage in self.plan.stages_on(device))
            with ExitStack() as stack:
                if ready is not None:
                    stack.callback(ready.abort)  # nobody waits for a device that failed
                stack.enter_context(self.queues[device].active())
                executor, bound = self.executor(device), self._bound(prepared, device)
                record = executor.run(bound, inputs, options, end, ready)
                with self.team.waiting("the results"):
                    batch.collect(device)
                if after is not None:
                    after(device)
            record.results.clear()
            return record

        try:
            for queue in self.queues.values():
                queue.begin(options.trace)
            with self.team.tensors.communicating():
                batch.records = self.team.run_local(work)
            for queue in self.queues.values():
                queue.end()
            batch.trace = None if self.clock is None else self.clock(prepared.plan)
            if not batch.agreement.waits:
                batch.agreement.refuse(outcome)
        except BaseException:
            batch.forget()  # a failed run leaves messages and saved tensors
            raise

    def _bound(self, prepared: Prepared, device: int) -> BoundActions:
        """A device's instructions for these microbatches."""
        if device not in prepared.bound:
            self.team.connect(sending_pairs(prepared.plan))  # microbatches of another shape may need others
            prepared.bound[device] = self.executor(device).bind(prepared.lowered, prepared.runs[device])
        return prepared.bound[device]

    def executor(self, device: int) -> Executor:
        """The device's executor, with the transport that is open now."""
        backend = self.team.backend(device)
        if device not in self._executors:
            own = {stage.index: self.states[stage.index] for stage in self.plan.stages_on(device)}
            update = Update(
                self.plan, own, self.norm_parameters, self.training.clip_norm, self.queues[device].device,
                self.team.replicas_of(device), self.training.needs_finite_loss,
            )  # fmt: skip
            self._executors[device] = Executor(
                backend, self.queues[device], update, self.team.replicas_of(device), self.offload.get(device),
                self.team.activities.get(device),
                None if self.graphs is None else self.graphs(self.queues[device].device),
            )  # fmt: skip
        self._executors[device].backend = backend
        return self._executors[device]
