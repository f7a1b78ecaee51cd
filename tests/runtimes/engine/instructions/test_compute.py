"""What F, B, I and W wait for, and which messages they read and write."""

import pytest
import torch
from panpipe.core.actions import Action, Kind
from panpipe.core.plan.lowering import lower
from panpipe.runtimes.devices.compute import HostQueue
from panpipe.runtimes.engine.frame import Frame
from panpipe.runtimes.engine.instructions.compute import _total
from panpipe.runtimes.engine.instructions.instructions import Binder
from panpipe.runtimes.engine.leaf_loader import LeafLoader
from panpipe.runtimes.engine.lowered_plan import LoweredPlan
from panpipe.runtimes.engine.messages import Message
from panpipe.runtimes.engine.tied import TiedReduction
from panpipe.runtimes.optimizer.clipping import NormParameters
from panpipe.runtimes.optimizer.update import Update

from ....support.plans import orders, plan_of, split_backward
from ....support.stages.two_stages import KEY, WIDTH, TwoStages

LOCAL = plan_of(orders("0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"), (0, 0))
APART = plan_of(orders("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), (0, 1))


class Transfer:
    """A transfer that records in a shared list that it was waited for."""

    def __init__(self, name, waited):
        self.name, self.waited = name, waited

    def wait(self):
        self.waited.append(self.name)


class Bound:
    """The instructions of one device by name, in a step that has begun."""

    def __init__(self, plan, device, ahead_limit=None, **options):
        self.stages = stages = TwoStages(**options)
        own = {stage.index: stages.states[stage.index] for stage in plan.stages_on(device)}
        self.frame = Frame(None, None, HostQueue(), Update(plan, own, NormParameters(()), None, None))
        reads = [range(len(piece.leaves)) for piece in stages.pieces]
        self.frame.loader = LeafLoader(self.frame.queue, stages.pieces, reads)
        self.frame.keys, self.frame.weights = [KEY] * 2, [None] * 2
        self.frame.seeds = [torch.tensor(0.5)] * 2
        runs = stages.on(plan, device)
        self.binder = Binder(
            LoweredPlan(plan, lower(plan), ahead_limit), device, runs, TiedReduction(plan, {}), self.frame
        )
        self.by_name = {str(one.action): one for one in self.binder.instructions}

    @torch.no_grad()
    def run(self, *names):
        for name in names:
            one = self.by_name[name]
            if one.wait is not None:
                one.wait()
            one.run()


def test_forward_writes_its_outputs_to_the_message_that_the_next_stage_reads():
    bound = Bound(LOCAL, 0)
    message = bound.binder.message(0, 1, 0)
    bound.run("0F0")
    assert [tuple(each.shape) for each in message.tensors] == [(2, WIDTH)]
    assert not bound.frame.results
    bound.run("1F0")
    assert message.tensors is None
    assert [microbatch for _, microbatch in bound.frame.results] == [0]


def test_forward_waits_for_the_transfer_of_what_it_reads():
    bound, waited = Bound(APART, 1), []
    message = bound.binder.message(0, 1, 0)
    message.tensors, message.handle = [torch.zeros(2, WIDTH)], Transfer("0→1", waited)
    bound.frame.traced = True
    bound.run("1F0")
    assert waited == ["0→1"]
    assert (message.handle, message.tensors) == (None, None)
    assert list(bound.frame.arrivals) == [Action(1, Kind.RECV_F, 0, 0)]
    assert Bound(LOCAL, 0).by_name["1F0"].wait is None


def test_backward_reads_the_gradient_message_and_frees_the_sends_that_it_proves_ended():
    bound, waited = Bound(APART, 0), []
    bound.run("0F0", "0F1")
    sent, gradient = bound.binder.message(0, 1, 0), bound.binder.message(1, 0, 0)
    sent.handle = Transfer("sent", waited)
    gradient.tensors, gradient.handle = [torch.ones(2, WIDTH)], Transfer("gradient", waited)
    bound.run("0B0")
    assert waited == ["gradient", "sent"]
    assert (sent.tensors, gradient.tensors) == (None, None)
    x = bound.stages.pieces[0].batch
    slope = 1 - torch.tanh(bound.stages.model[0](x)) ** 2
    torch.testing.assert_close(bound.stages.model[0].bias.grad, slope.sum(0))


def test_input_and_weight_backward_give_the_gradients_of_the_full_backward():
    halves = plan_of(tuple(split_backward(row, 1) for row in LOCAL.device_actions), (0, 0))
    found = []
    for plan in (LOCAL, halves):
        bound = Bound(plan, 0)
        bound.run(*(str(action) for action in plan.device_actions[0]))
        found.append([p.grad for p in bound.stages.model.parameters()])
    for whole, split in zip(*found, strict=True):
        torch.testing.assert_close(split, whole)


def test_recompute_runs_between_forward_and_backward():
    plan = plan_of(LOCAL.device_actions, (0, 0), recompute=[0])
    bound = Bound(plan, 0, recompute=(0,))
    bound.run("0F0", "1F0", "1B0")
    held = len(bound.stages.runs[0].held(0))
    bound.run("0RECOMPUTE0")
    assert len(bound.stages.runs[0].held(0)) > held
    bound.run("0B0")
    assert bound.stages.model[0].weight.grad is not None


def test_weight_computed_by_the_step_replaces_the_seed_of_its_microbatch():
    bound = Bound(LOCAL, 0)
    name = bound.stages.runs[1].programs.results[0]
    bound.frame.weights, bound.frame.scale = [name, None], torch.tensor(4.0)
    bound.run("0F0", "1F0", "0F1", "1F1")
    assert bound.frame.seeds[0] == 4 * bound.frame.results[name, 0]
    assert bound.frame.seeds[1] == 0.5


@pytest.mark.parametrize(("limit", "waited"), [(1, ["0"]), (2, [])])
def test_forward_waits_until_its_reader_is_within_the_ahead_limit(limit, waited):
    bound, seen = Bound(APART, 0, ahead_limit=lambda stage, reader: limit), []
    bound.run("0F0")
    bound.binder.message(0, 1, 0).handle = Transfer("0", seen)
    bound.run("0F1")
    assert seen == waited


def test_gradients_of_several_readers_are_summed_in_the_given_order():
    # In float32 this sum depends on its order.
    values = [torch.tensor([1e8]), torch.tensor([-1e8]), torch.tensor([1.0])]
    assert _total([(Message([value]), 0) for value in values]) == 1.0
    assert _total([(Message([value]), 0) for value in (values[2], values[0], values[1])]) == 0.0
