"""The graphs of one device: captured once in the order of its plan, and again where a step would differ."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from attrs import evolve
from panpipe.backends.memcpy import connect
from panpipe.core.errors import RequestError
from panpipe.core.lowering.lowering import lower
from panpipe.runtimes.engine.executor import Executor
from panpipe.runtimes.engine.lowered_plan import LoweredPlan
from panpipe.runtimes.engine.step_data import StepOptions
from panpipe.runtimes.engine.step_graphs import StepGraphs
from panpipe.runtimes.update.update import Ending

from ...support.backends.fake_graphs import FakeGraphPool
from ...support.plans import orders, plan_of
from ...support.stages.two_stages import TwoStages

PLAN = plan_of(orders("0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1"), (0, 0))
ONE_BY_ONE = evolve(PLAN, device_actions=orders("0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"))
SPLIT = evolve(PLAN, device_actions=orders("0F0 1F0 0F1 1F1 1I0 0I0 1W0 0W0 1I1 0I1 1W1 0W1"))


class Device:
    """One device with both stages, with and without graphs."""

    def __init__(self, plan=PLAN, **options):
        self.pools = [FakeGraphPool(torch.device("cpu")), None]
        self.stages = [TwoStages(**options), TwoStages(**options)]
        self.stages[1].pieces = self.stages[0].pieces
        self.executors = [
            stages.executor(plan, connect(1)[0], pool=pool)
            for stages, pool in zip(self.stages, self.pools, strict=True)
        ]
        self.bound = [
            executor.bind(LoweredPlan(plan, lower(plan)), stages.on(plan, 0))
            for executor, stages in zip(self.executors, self.stages, strict=True)
        ]

    def step(self, clear=True, ending=Ending.STEP):
        """A step of both, which have the same parameters and gradients afterwards."""
        for executor, bound, stages in zip(self.executors, self.bound, self.stages, strict=True):
            executor.run(bound, stages.inputs(clear), StepOptions(ending))
        for one, other in zip(*(stages.model.parameters() for stages in self.stages), strict=True):
            assert torch.equal(one, other)
            assert torch.equal(one.grad, other.grad)
        return self.pools[0].captures


@pytest.mark.parametrize("plan", [PLAN, ONE_BY_ONE, SPLIT], ids=["all forwards first", "one by one", "split"])
def test_actions_are_captured_once(plan):
    device = Device(plan)
    count = len(plan.device_actions[0])
    assert [device.step() for _ in range(3)] == [count] * 3
    assert device.pools[0].replays == 3 * count


def test_recomputation_is_captured():
    plan = evolve(PLAN, memory=evolve(PLAN.memory, recompute=(0, 1)))
    device = Device(plan, recompute=(0, 1))
    recomputed = sum(action.kind.value == "RECOMPUTE" for action in lower(plan)[0])
    assert recomputed == 4
    assert [device.step() for _ in range(2)] == [8 + recomputed] * 2


def test_steps_that_add_to_gradients_have_graphs_of_their_own():
    device = Device()
    found = [device.step(clear, Ending.KEEP) for clear in (True, False, False, True, False)]
    assert found == [8, 16, 16, 16, 16]


def test_program_that_reads_a_value_is_refused_and_changes_nothing(monkeypatch):
    device = Device()
    run = device.stages[0].runs[1]
    forward = run.forward

    def reading(*given):
        outputs, results = forward(*given)
        results[0].item()
        return outputs, results

    monkeypatch.setattr(run, "forward", reading)
    with pytest.raises(RequestError, match=r"cannot capture 1F0: .*_local_scalar_dense.*; change that line, or leave"):
        device.executors[0].run(device.bound[0], device.stages[0].inputs())
    assert not any(run.held(m) for run in device.stages[0].runs.values() for m in range(2))
    assert all(parameter.grad is None for parameter in device.stages[0].model.parameters())


def test_threads_that_share_a_device_capture_and_warm_up_one_after_another(monkeypatch):
    inside, most = set(), []

    def alone(method):
        def run(*given):
            inside.add(threading.get_ident())
            most.append(len(inside))
            time.sleep(0.05)
            try:
                return method(*given)
            finally:
                inside.discard(threading.get_ident())

        return run

    monkeypatch.setattr(StepGraphs, "_capture", alone(StepGraphs._capture))
    monkeypatch.setattr(Executor, "_warm_up", alone(Executor._warm_up))
    devices = [Device() for _ in range(3)]
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(Device.step, devices)) == [8] * 3
    assert most == [1] * 6
