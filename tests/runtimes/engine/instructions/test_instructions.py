"""The instruction of each action, the messages that instructions share, and what a fence waits for."""

import pytest
from panpipe.core.actions import Action, Kind
from panpipe.core.errors import RequestError
from panpipe.core.plan.lowering import lower
from panpipe.core.trace.trace import COLLECTIVE_QUEUE, COMPUTE_QUEUE, receive_queue, send_queue
from panpipe.runtimes.devices.compute import HostQueue
from panpipe.runtimes.engine.frame import Frame
from panpipe.runtimes.engine.instructions.instructions import INSTRUCTIONS, Binder, Instruction, executes
from panpipe.runtimes.engine.lowered_plan import LoweredPlan
from panpipe.runtimes.engine.tied import TiedReduction
from panpipe.runtimes.optimizer.clipping import NormParameters
from panpipe.runtimes.optimizer.stage_state import StageState
from panpipe.runtimes.optimizer.update import Update
from panpipe.runtimes.programs.linked_stage import LinkedStage

from ....support.plans import orders, plan_of
from ....support.stages.two_stages import TwoStages

PLAN = plan_of(orders("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), (0, 1))


def frame_of(stages, plan, device):
    own = {stage.index: stages.states[stage.index] for stage in plan.stages_on(device)}
    return Frame(None, None, HostQueue(), Update(plan, own, NormParameters(()), None, None))


def binder_of(plan, device, lowered=None):
    stages = TwoStages()
    frame = frame_of(stages, plan, device)
    return Binder(
        LoweredPlan(plan, lowered or lower(plan)), device, stages.on(plan, device), TiedReduction(plan, {}), frame
    )


class Pending:
    """A handle that counts its waits."""

    def __init__(self):
        self.waited = 0

    def wait(self):
        self.waited += 1


def test_binder_binds_every_action_on_the_queue_of_its_kind():
    found = [(str(one.action), one.queue) for one in binder_of(PLAN, 1).instructions]
    receive, send = receive_queue(0), send_queue(0)
    assert found == [
        ("1RECV_F0<0", receive), ("1RECV_F1<0", receive), ("1F0", COMPUTE_QUEUE), ("1B0", COMPUTE_QUEUE),
        ("1SEND_B0>0", send), ("1F1", COMPUTE_QUEUE), ("1B1", COMPUTE_QUEUE), ("1SEND_B1>0", send),
        ("1STEP", COMPUTE_QUEUE),
    ]  # fmt: skip


def test_binder_has_one_message_object_for_each_message():
    binder = binder_of(PLAN, 1)
    assert binder.message(0, 1, 0) is binder.message(0, 1, 0)
    assert len({id(binder.message(*key)) for key in ((0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1))}) == 4
    receive, send = binder.instructions[0], next(i for i in binder.instructions if i.action.kind is Kind.SEND_B)
    assert receive.message is binder.message(0, 1, 0)
    assert send.message is binder.message(1, 0, 0)


def test_binder_finds_the_stage_of_a_microbatch_and_of_a_whole_step():
    binder = binder_of(PLAN, 1)
    assert binder.run_of(Action(1, Kind.F, 1)) is binder.runs[1][1]
    assert binder.run_of(Action(1, Kind.STEP)) is binder.runs[0][1]


def test_binder_refuses_a_kind_without_a_registered_function(monkeypatch):
    monkeypatch.delitem(INSTRUCTIONS, Kind.STEP)
    with pytest.raises(RequestError, match="the plan has 0STEP, and no instruction is registered for STEP: remove it"):
        binder_of(PLAN, 0)


class ForwardAndBackward(LinkedStage):
    """A stage without I, W and RECOMPUTE, such as one of torch.compile."""

    def __init__(self):
        super().__init__(0, [], [], [], {}, StageState({}, {}, None), [])

    def forward(self, microbatch, boundary, leaves, key):
        return [], []

    def backward(self, microbatch, tangents, seed, leaves, key):
        return []


@pytest.mark.parametrize(
    ("order", "recompute", "action"), [("0F0 0I0 0W0", (), "0I0"), ("0F0 0B0", (0,), "0RECOMPUTE0")]
)
def test_binder_refuses_an_action_that_its_stage_does_not_have(order, recompute, action):
    plan = plan_of(orders(order), (0,), recompute=recompute)
    stage = ForwardAndBackward()
    frame = Frame(None, None, HostQueue(), Update(plan, {0: stage.state}, NormParameters(()), None, None))
    with pytest.raises(
        RequestError, match=f"the plan has {action}, but the programs of stage 0 are F and B only: plan it with B"
    ):
        Binder(LoweredPlan(plan, lower(plan)), 0, [{0: stage}], TiedReduction(plan, {}), frame)


def test_executes_registers_a_function_for_several_kinds(monkeypatch):
    for kind in (Kind.F, Kind.W):
        monkeypatch.setitem(INSTRUCTIONS, kind, INSTRUCTIONS[kind])

    @executes(Kind.F, Kind.W)
    def bind(binder, action):
        return Instruction(action, None, lambda: None)

    assert INSTRUCTIONS[Kind.F] is INSTRUCTIONS[Kind.W] is bind
    assert INSTRUCTIONS[Kind.B] is not bind


def test_step_waits_only_for_the_reduction_of_its_own_stage():
    plan = plan_of(orders("0F0 1F0 1B0 0B0"), (0, 0), data=2)
    binder = binder_of(plan, 0)
    by_name = {str(one.action): one for one in binder.instructions}
    assert by_name["0REDUCE_GRAD"].queue == COLLECTIVE_QUEUE
    pending = {stage: Pending() for stage in (0, 1)}
    binder.frame.pending = {Action(stage, Kind.REDUCE_GRAD): each for stage, each in pending.items()}
    by_name["1STEP"].wait()
    assert (pending[0].waited, pending[1].waited) == (0, 1)
    assert list(binder.frame.pending) == [Action(0, Kind.REDUCE_GRAD)]
    by_name["0STEP"].wait()
    assert (pending[0].waited, pending[1].waited) == (1, 1)


def test_step_without_replicas_waits_for_nothing():
    steps = [one for one in binder_of(PLAN, 0).instructions if one.action.kind is Kind.STEP]
    assert [one.wait for one in steps] == [None]
