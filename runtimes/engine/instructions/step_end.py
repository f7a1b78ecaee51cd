"""The instructions of what replicas sum and gather, and of the end of a step: SCATTER_GRAD, REDUCE_GRAD, REDUCE_TIED,
SYNC, STEP, UNSHARD, RESHARD; see ``runtimes/update``."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from ....backends.contract import Backend, Handle
from ....core.actions import Action, Kind
from ....core.trace.trace import COLLECTIVE_QUEUE
from .instructions import Binder, Instruction, executes


class OverReplicas(Handle, Protocol):
    """A reduction or a gather over the replicas, in flight."""

    @property
    def bytes(self) -> int:
        """What it moves."""


def _bind_over_replicas(binder: Binder, action: Action, start: Callable[[Backend], OverReplicas]) -> Instruction:
    """An action that starts a collective operation over the replicas, and leaves its handle in ``Frame.pending``."""
    frame = binder.frame
    moved = 0

    def call() -> None:
        nonlocal moved
        assert frame.replicas is not None
        started = frame.pending[action] = start(frame.replicas)
        moved = started.bytes

    return Instruction(action, None, call, None, COLLECTIVE_QUEUE, lambda: moved)


@executes(Kind.REDUCE_GRAD)
def _bind_reduction_over_replicas(binder: Binder, action: Action) -> Instruction:
    frame, state = binder.frame, binder.run_of(action).state

    def start(replicas: Backend) -> OverReplicas:
        reduction = state.reduce_gradients(replicas)
        if frame.traced and frame.queue.device.type == "cpu":  # on a GPU the queue's marks are events
            reduction.watch()
        return reduction

    return _bind_over_replicas(binder, action, start)


@executes(Kind.SCATTER_GRAD)
def _bind_scatter(binder: Binder, action: Action) -> Instruction:
    scatter = binder.runs[0][action.stage].state.scatter
    assert scatter is not None
    return _bind_over_replicas(binder, action, lambda _: scatter.scatter())


@executes(Kind.UNSHARD)
def _bind_unshard(binder: Binder, action: Action) -> Instruction:
    state = binder.run_of(Action(action.stage, Kind.UNSHARD)).state  # its number is not that of a microbatch
    return _bind_over_replicas(binder, action, state.gather if action.microbatch is None else state.unshard)


@executes(Kind.RESHARD)
def _bind_reshard(binder: Binder, action: Action) -> Instruction:
    """Frees the parameters, and what was computed from them alone; a run without actions here ends its all-gather."""
    stage = action.stage
    runs = list({id(own[stage]): own[stage] for own in binder.runs if stage in own}.values())
    shared = runs[0].state.shared
    assert shared is not None
    unshard = Action(stage, Kind.UNSHARD, action.microbatch)

    def call() -> None:
        for run in runs:
            run.free_shared()
        shared.free()

    return Instruction(action, partial(binder.frame.wait_pending, unshard), call, None, COLLECTIVE_QUEUE)


@executes(Kind.REDUCE_TIED)
def _bind_tied_reduction(binder: Binder, action: Action) -> Instruction:
    frame, tied = binder.frame, binder.tied

    def call() -> None:
        if not frame.tied_reduced:  # the first REDUCE_TIED of a step reduces for all stages of this device
            tied.reduce(frame.backend)
            frame.tied_reduced = True

    return Instruction(action, frame.wait_pending, call)


@executes(Kind.SYNC)
def _bind_sync(binder: Binder, action: Action) -> Instruction:
    frame = binder.frame
    return Instruction(action, frame.wait_pending, lambda: frame.update.sync(frame.backend))


@executes(Kind.STEP)
def _bind_step(binder: Binder, action: Action) -> Instruction:
    return Instruction(action, None, partial(binder.frame.update.step, binder.run_of(action).state))
