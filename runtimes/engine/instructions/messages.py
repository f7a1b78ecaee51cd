"""The instructions of sends and receives."""

import torch

from ....core.actions import Action, Kind
from ....core.trace.trace import receive_queue, send_queue
from ..step_data import Message
from .instructions import Binder, Instruction, executes


@executes(Kind.SEND_F, Kind.SEND_B)
def _bind_send(binder: Binder, action: Action) -> Instruction:
    frame, reader = binder.frame, action.peer or 0
    peer, message = binder.placement[reader], binder.message(action.stage, reader, action.microbatch or 0)

    def call() -> None:
        assert message.tensors is not None
        message.handle = frame.backend.send(message.tensors, peer)
        if frame.traced:
            frame.traced_sends[action] = message.handle

    return Instruction(action, None, call, message, send_queue(peer), lambda: _bytes(message))


@executes(Kind.RECV_F, Kind.RECV_B)
def _bind_receive(binder: Binder, action: Action) -> Instruction:
    frame, sender = binder.frame, action.peer or 0
    peer, message = binder.placement[sender], binder.message(sender, action.stage, action.microbatch or 0)
    shapes = binder.run_of(action).message(action.kind is Kind.RECV_F, sender)
    device = frame.queue.device

    def call() -> None:
        message.tensors = message.buffers
        if message.tensors is None:
            message.tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
        message.handle = frame.backend.receive(message.tensors, peer)

    return Instruction(action, None, call, message, receive_queue(peer), lambda: _bytes(message))


def _bytes(message: Message) -> int:
    return 0 if message.tensors is None else sum(tensor.nbytes for tensor in message.tensors)
