"""The instructions of what replicas sum and gather, and of the end of a step: SCATTER_GRAD, REDUCE_GRAD, REDUCE_TIED,
SYNC, STEP, UNSHARD, RESHARD; see ``runtimes/update``.

Tied weights: every stage that reads one has a copy of it, and all copies get the sum of their gradients. The devices
with a copy send each other their gradients, and each adds all of them in the order of the stages.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ....backends.contract import Backend, Handle
from ....core.actions import Action, Kind
from ....core.plan.plan import Plan, TiedWeight
from ....core.trace.trace import COLLECTIVE_QUEUE
from ...update.stage_state import StageState
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
    frame, states = binder.frame, {stage: run.state for stage, run in binder.runs[0].items()}

    def call() -> None:
        if not frame.tied_reduced:  # the first REDUCE_TIED of a step reduces for all stages of this device
            _reduce_tied(binder.plan, states, frame.backend)
            frame.tied_reduced = True

    return Instruction(action, frame.wait_pending, call)


def _reduce_tied(plan: Plan, states: Mapping[int, StageState], backend: Backend) -> None:
    """Sum the gradients of the tied weights that this device has copies of.

    Every device sends its gradients before it waits for any, so the exchange cannot deadlock.

    Args:
        states: of this device's stages. A sharded stage exchanges only this replica's slice of the gradient.
    """
    sends, receives, placement = list[Handle](), list[Handle](), plan.placement
    found: list[tuple[TiedWeight, list[Tensor]]] = []
    for weight in plan.tied:
        own = {stage: states[stage] for stage in weight.stages if stage in states}
        if not own or not all(_exchanged(state, weight.name) for state in own.values()):
            continue
        copies = {stage: state.updated[weight.name] for stage, state in own.items()}
        gradients = {s: torch.zeros_like(copy) if copy.grad is None else copy.grad for s, copy in copies.items()}
        others = dict.fromkeys(placement[stage] for stage in weight.stages if stage not in own)
        sends += [backend.send([*gradients.values()], other) for other in others]
        like = next(iter(copies.values()))
        for other in others:
            stages = [stage for stage in weight.stages if placement[stage] == other]
            buffers = [torch.empty_like(like, memory_format=torch.contiguous_format) for _ in stages]
            receives.append(backend.receive(buffers, other))
            gradients |= dict(zip(stages, buffers, strict=True))
        found.append((weight, [gradients[stage] for stage in weight.stages]))
    for handle in (*receives, *sends):  # a transport may post a receive when it is waited for
        handle.wait()
    for weight, parts in found:
        total = sum(parts[1:], parts[0])
        for number, stage in enumerate(stage for stage in weight.stages if stage in states):
            states[stage].updated[weight.name].grad = total.clone() if number else total


def _exchanged(state: StageState, name: str) -> bool:
    """Whether the gradients of a tied weight are exchanged, by the same answer on all devices of a replica with a copy.

    It may be frozen now, or all of its slices may belong to other replicas.
    """
    return state.parameters[name].requires_grad and name in state.updated


@executes(Kind.SYNC)
def _bind_sync(binder: Binder, action: Action) -> Instruction:
    frame = binder.frame
    return Instruction(action, frame.wait_pending, lambda: frame.update.sync(frame.backend))


@executes(Kind.STEP)
def _bind_step(binder: Binder, action: Action) -> Instruction:
    return Instruction(action, None, partial(binder.frame.update.step, binder.run_of(action).state))
