"""The instructions of OFFLOAD and RELOAD: they issue copies, for which the actions wait that read their tasks."""

from collections.abc import Callable

from ....core.actions import Action, Kind
from ....core.trace.trace import FROM_HOST_QUEUE, HOST_COPY_QUEUE, TO_HOST_QUEUE
from ...offload.copies import Copy
from ...offload.device_offload import BoundOffload, MovedStorages
from ...programs.stage_run import StageRun
from .instructions import Binder, Instruction, executes


@executes(Kind.OFFLOAD)
def _bind_offload(binder: Binder, action: Action) -> Instruction:
    queue = HOST_COPY_QUEUE if binder.host_copy_queues == 1 else TO_HOST_QUEUE
    return _issuing(binder, action, queue, BoundOffload.out)


@executes(Kind.RELOAD)
def _bind_reload(binder: Binder, action: Action) -> Instruction:
    queue = HOST_COPY_QUEUE if binder.host_copy_queues == 1 else FROM_HOST_QUEUE
    return _issuing(binder, action, queue, BoundOffload.back)


Issue = Callable[[BoundOffload, StageRun, int], tuple[Copy, MovedStorages]]


def _issuing(binder: Binder, action: Action, queue: str, issue: Issue) -> Instruction:
    frame, offload, run = binder.frame, binder.offload, binder.run_of(action)
    microbatch = action.microbatch or 0
    assert offload is not None
    moved = 0

    def call() -> None:
        nonlocal moved
        frame.pending[action], storages = issue(offload, run, microbatch)
        moved = sum(storages.sizes)
        if frame.meter is not None and action.kind is Kind.RELOAD:
            frame.meter.watch(storages.data)

    return Instruction(action, None, call, None, queue, lambda: moved)
