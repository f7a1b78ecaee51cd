"""The captured graphs of one device's part of a step: captured before its first message, replayed in every step.

To capture, the device's actions run once in the order of the plan, without messages, results and time: the Python of a
step decides as in a step when a tensor is allocated, sent, received and freed. So the graphs' memory is reused where a
step reuses it, under the same guarantee: what another stream reads or writes (a message that is sent or received) is
freed at the action that has ordered the compute stream after the transfer.

    capture   RECV m: buffers in the pool │ F m: captured │ SEND m: nothing │ … the same waits and frees
    replay    RECV m: into these buffers  │ F m: replayed │ SEND m: its outputs, at their addresses

Results of a step (loss, metrics) are kept until its end. Whatever outlives a step is in no pool: parameters, buffers,
gradients, and the table of results, which is computed outside of the graphs.

Which action writes a parameter's first gradient, and which ones add to it, is fixed by the plan and by whether the step
adds to earlier gradients. So there are graphs for either.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from ...backends.contract import ENDED, Backend, Handle
from ...backends.streams import release_unused
from ...core.actions import RECV_KINDS, SEND_KINDS, WORK_KINDS, Action
from ...core.errors import RequestError
from ..programs.graphs.graph_pool import CudaGraphPool, alone_on, graph_pool
from ..programs.graphs.graphed_stage import CallKey, Capture, GraphedCall, GraphedStage
from ..programs.stage_run import Stages
from .instructions.instructions import Instruction
from .step_data import Frame, Message, StepRecord

_LOG = logging.getLogger("panpipe.graphs")


@frozen
class CapturedStep:
    """The graphs for steps that find gradients for the same parameters.

    Args:
        buffers: the received messages, with their memory.
    """

    calls: dict[CallKey, GraphedCall]
    buffers: Sequence[tuple[Message, list[Tensor]]]


class StepGraphs:
    """The graphs of one device for microbatches of certain shapes.

    A device of which one stage has no graphs runs all of its stages without: that stage may read an input at any later
    time, and graphs reuse memory.

    Args:
        given: for each microbatch the device's stages by index.

    Attributes:
        runs: the stages that replay graphs, in their place.
        stages: each of these once.
        instructions: those that are captured.
    """

    def __init__(self, pool: CudaGraphPool, device: torch.device, given: Stages) -> None:
        self.pool, self._device = pool, device
        self.instructions: Sequence[Instruction] = ()
        self._addresses: list[int] = []
        self._captured: dict[tuple[bool, ...], CapturedStep] = {}
        self.runs, graphed = given, dict[int, GraphedStage]()
        if all(run.has_graphs for own in given for run in own.values()):
            self.runs = [
                {index: graphed.setdefault(id(run), GraphedStage(run)) for index, run in own.items()} for own in given
            ]
        self.stages = [*graphed.values()]

    @classmethod
    def on(cls, device: torch.device) -> Callable[[Stages], "StepGraphs"]:
        """Creates the graphs of a device, which share a new pool."""
        return partial(cls, graph_pool(device), device)

    def alone(self) -> AbstractContextManager[Any]:
        """See `Graphs`."""
        return alone_on(self._device)

    def prepare(self, frame: Frame) -> None:
        """Capture what the next step replays, unless it is captured already, and select it.

        It is captured again if the memory of a parameter, a buffer or a gradient has moved.

        Args:
            frame: of the step, which has not begun.

        Raises:
            RequestError: a program cannot be captured.
        """
        if not self.stages:
            return
        with torch.no_grad():
            addresses = [tensor.data_ptr() for stage in self.stages for tensor in stage.run.fixed]
            if addresses != self._addresses:
                self._captured.clear()
                self._addresses = addresses
            key = self._accumulated()
            if key not in self._captured:
                self._captured[key] = self._capture(frame)
        selected = self._captured[key]
        for stage in self.stages:
            stage.calls, stage.stand_ins = selected.calls, {}
        for message, buffers in selected.buffers:
            message.buffers = buffers

    def _accumulated(self) -> tuple[bool, ...]:
        """For each parameter whether it has a gradient, which is then in the memory that graphs add to."""
        found = []
        for stage in self.stages:
            for parameter, memory in stage.run.gradient_memory.items():
                gradient = parameter.grad
                if gradient is not None and gradient.data_ptr() != memory.data_ptr():
                    parameter.grad = memory.copy_(gradient)
                found.append(gradient is not None)
        return tuple(found)

    def _capture(self, frame: Frame) -> CapturedStep:
        """Run all actions once, recorded."""
        release_unused([frame.queue.device])  # what the programs used before: the pool takes none of it
        capture, buffers = Capture(self.pool), list[tuple[Message, list[Tensor]]]()
        parameters = [parameter for stage in self.stages for parameter in stage.run.gradient_memory]
        before = frame.backend, frame.seeds, frame.record, frame.meter
        gradients = [parameter.grad for parameter in parameters]
        frame.backend, frame.seeds, frame.record, frame.meter = _NoTransport(), list(frame.seeds), StepRecord(), None
        for stage in self.stages:
            stage.capture = capture
        try:
            for instruction in self.instructions:
                self._capture_one(instruction, capture, buffers)
            for instruction in self.instructions:
                if instruction.message is not None:
                    instruction.message.finish_send()
        finally:
            frame.backend, frame.seeds, frame.record, frame.meter = before
            for stage in self.stages:
                stage.capture = None
                stage.run.forget()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
        _LOG.info(
            "captured %d graphs, which use %.1f MB with the earlier ones", len(capture.calls), self.pool.bytes / 1e6
        )
        return CapturedStep(capture.calls, buffers)

    def _capture_one(
        self, instruction: Instruction, capture: Capture, buffers: list[tuple[Message, list[Tensor]]]
    ) -> None:
        action, message = instruction.action, instruction.message
        if action.kind in RECV_KINDS and message is not None:
            message.buffers = None
            with self.pool.allocating():
                instruction.run()
            assert message.tensors is not None
            capture.own(message.tensors)
            buffers.append((message, [self.pool.alias(tensor) for tensor in message.tensors]))
        elif action.kind in WORK_KINDS or action.kind in SEND_KINDS:
            if instruction.wait is not None:
                instruction.wait()
            try:
                instruction.run()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise _refusal(action, error) from error


def _refusal(action: Action, error: RuntimeError) -> RequestError:
    """The error of a program that cannot be captured; its note names the line of the user's."""
    reason = str(error).strip().partition("\n")[0]
    place = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
    return RequestError(
        f"cuda_graphs=True cannot capture {action}: {reason}{place}: a graph repeats operators without the host, so it "
        "must not read values of tensors, as .item() and boolean masks do; change that line, or leave cuda_graphs out"
    )


class _NoTransport(Backend):
    """Moves nothing: the messages of a capture."""

    name = "none"

    def send(self, tensors: Sequence[Tensor], peer: int) -> Handle:
        return ENDED

    def receive(self, buffers: Sequence[Tensor], peer: int) -> Handle:
        return ENDED

    def close(self, failure: BaseException | None = None) -> None:
        pass
