"""The instructions of OFFLOAD and RELOAD: they issue copies, for which the actions wait that read their tasks."""

from collections.abc import Callable

from ....core.actions import Action, Kind
from ....core.trace.trace import FROM_HOST_QUEUE, HOST_COPY_QUEUE, TO_HOST_QUEUE
from ...offload.device_offload import BoundOffload, MovingCopy
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


def _issuing(
    binder: Binder, action: Action, queue: str, issue: Callable[[BoundOffload, StageRun, int], MovingCopy]
) -> Instruction:
    frame, offload, run = binder.frame, binder.offload, binder.run_of(action)
    microbatch = action.microbatch or 0
    assert offload is not None
    moved = 0

    def call() -> None:
        nonlocal moved
        copy = frame.pending[action] = issue(offload, run, microbatch)
        moved = sum(copy.moved.sizes)
        if frame.meter is not None and action.kind is Kind.RELOAD:
            frame.meter.watch(copy.moved.data)

    return Instruction(action, None, call, None, queue, lambda: moved)
