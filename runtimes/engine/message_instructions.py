"""The instructions of sends and receives."""

import torch

from ...core.actions import Action, Kind
from ...core.trace.trace import receive_queue, send_queue
from .instructions import Binder, Instruction, executes
from .mail import Mail


@executes(Kind.SEND_F, Kind.SEND_B)
def _bind_send(binder: Binder, action: Action) -> Instruction:
    frame, reader = binder.frame, action.peer or 0
    peer, mail = binder.placement[reader], binder.message(action.stage, reader, action.microbatch or 0)

    def call() -> None:
        assert mail.tensors is not None
        mail.handle = frame.messages.send(mail.tensors, peer)
        if frame.traced:
            frame.flying[action] = mail.handle

    return Instruction(action, None, call, mail, send_queue(peer), lambda: _bytes(mail))


@executes(Kind.RECV_F, Kind.RECV_B)
def _bind_receive(binder: Binder, action: Action) -> Instruction:
    frame, sender = binder.frame, action.peer or 0
    peer, mail = binder.placement[sender], binder.message(sender, action.stage, action.microbatch or 0)
    shapes = binder.run_of(action).message(action.kind is Kind.RECV_F, sender)
    device = frame.queue.device

    def call() -> None:
        mail.tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
        mail.handle = frame.messages.receive(mail.tensors, peer)

    return Instruction(action, None, call, mail, receive_queue(peer), lambda: _bytes(mail))


def _bytes(mail: Mail) -> int:
    return 0 if mail.tensors is None else sum(tensor.nbytes for tensor in mail.tensors)
