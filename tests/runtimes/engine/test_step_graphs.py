"""The graphs of one device: captured once in the order of its plan, and again where a step would differ."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from panpipe.backends.memcpy import connect
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
