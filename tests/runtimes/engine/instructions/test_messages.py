"""The calls of the transport by sends and receives."""

import pytest
import torch
from attrs import define, field
from panpipe.core.actions import Action, Kind
from panpipe.core.plan.lowering import lower
from panpipe.runtimes.devices.compute import HostQueue
from panpipe.runtimes.engine.frame import Frame
from panpipe.runtimes.engine.instructions.instructions import Binder
from panpipe.runtimes.engine.lowered_plan import LoweredPlan
from panpipe.runtimes.engine.tied import TiedReduction
from panpipe.runtimes.optimizer.clipping import NormParameters
from panpipe.runtimes.optimizer.update import Update

from ....support.plans import orders, plan_of
from ....support.stages.two_stages import WIDTH, TwoStages

PLAN = plan_of(orders("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), (0, 1))
BYTES = 2 * WIDTH * 4


@define
class Transport:
    """Records its calls; a handle is the number of the call."""

    calls: list = field(factory=list)

    def send(self, tensors, peer):
        self.calls.append(("send", list(tensors), peer))
        return len(self.calls)

    def receive(self, buffers, peer):
        self.calls.append(("receive", list(buffers), peer))
        return len(self.calls)


@pytest.fixture
def bound():
    """Instructions of device 0 by name, with the binder, the frame and the transport."""
    stages, transport = TwoStages(), Transport()
    update = Update(PLAN, {0: stages.states[0]}, NormParameters(()), None, None)
    frame = Frame(None, transport, HostQueue(), update)
    binder = Binder(LoweredPlan(PLAN, lower(PLAN)), 0, stages.on(PLAN, 0), TiedReduction(PLAN, {}), frame)
    return {one.action: one for one in binder.instructions}, binder, frame, transport


def test_send_passes_the_message_to_the_transport_and_keeps_its_tensors(bound):
    instructions, binder, frame, transport = bound
    send, message, tensor = instructions[Action(0, Kind.SEND_F, 1, 1)], binder.message(0, 1, 1), torch.ones(2, WIDTH)
    message.tensors = [tensor]
    send.run()
    assert [(name, peer) for name, _, peer in transport.calls] == [("send", 1)]
    assert transport.calls[0][1][0] is tensor
    assert (message.handle, message.tensors, send.moved()) == (1, [tensor], BYTES)
    assert not frame.traced_sends


def test_receive_posts_contiguous_buffers_of_the_messages_shapes_without_waiting(bound):
    instructions, binder, _, transport = bound
    receive, message = instructions[Action(0, Kind.RECV_B, 0, 1)], binder.message(1, 0, 0)
    assert receive.moved() == 0
    assert receive.wait is None
    receive.run()
    name, buffers, peer = transport.calls[0]
    assert (name, peer) == ("receive", 1)
    assert [(tuple(b.shape), b.dtype, b.is_contiguous()) for b in buffers] == [((2, WIDTH), torch.float32, True)]
    assert message.tensors[0] is buffers[0]
    assert (message.handle, receive.moved()) == (1, BYTES)


def test_send_of_a_traced_step_keeps_the_handle_of_its_transfer(bound):
    instructions, binder, frame, _ = bound
    frame.traced = True
    action = Action(0, Kind.SEND_F, 0, 1)
    binder.message(0, 1, 0).tensors = [torch.ones(2, WIDTH)]
    instructions[action].run()
    assert frame.traced_sends == {action: 1}
