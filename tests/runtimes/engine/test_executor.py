"""The executor of one device, called directly: what it runs, frees and records, and how its step ends."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from attrs import evolve
from panpipe.backends.memcpy import connect
from panpipe.core.plan.lowering import lower
from panpipe.core.plan.plan import Plan
from panpipe.runtimes.devices.compute import HostQueue
from panpipe.runtimes.engine.executor import BoundActions, Executor
from panpipe.runtimes.engine.lowered_plan import LoweredPlan
from panpipe.runtimes.engine.step_data import StepOptions
from panpipe.runtimes.optimizer.update import Ending

from ...support.plans import orders, plan_of
from ...support.stages.two_stages import RATE, TwoStages, assert_same_gradients

ONE_DEVICE = plan_of(orders("0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"), (0, 0))
TWO_DEVICES = plan_of(orders("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), (0, 1))


def bound_on(stages: TwoStages, plan: Plan, executor: Executor) -> BoundActions:
    return executor.bind(LoweredPlan(plan, lower(plan)), stages.on(plan, executor.device))


def alone(stages: TwoStages, plan: Plan = ONE_DEVICE, queue: HostQueue | None = None) -> tuple[Executor, BoundActions]:
    """The executor of the only device."""
    executor = stages.executor(plan, connect(1)[0], queue)
    return executor, bound_on(stages, plan, executor)


def test_executor_sums_the_gradients_of_microbatches_and_steps():
    stages = TwoStages()
    expected = stages.alone()
    executor, bound = alone(stages)
    weights = {name: p.detach().clone() for name, p in stages.model.named_parameters()}
    record = executor.run(bound, stages.inputs())
    assert_same_gradients(stages.model, expected)
    for name, p in stages.model.named_parameters():
        assert torch.equal(p, weights[name] - RATE * p.grad)
    assert [microbatch for _, microbatch in record.results] == [0, 1]


def test_executor_frees_saved_tensors_after_backward():
    stages = TwoStages()
    executor, bound = alone(stages)
    record = executor.run(bound, stages.inputs(), StepOptions(trace=True, watch=True))
    assert all(not run.held(m) for run in stages.runs.values() for m in range(2))
    assert record.memory[-1][1] == 0
    # One microbatch at a time: the second one's tensors are there only when the first one's are gone.
    two_at_once = evolve(ONE_DEVICE, device_actions=orders("0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1"))
    executor, bound = alone(stages, two_at_once)
    both = executor.run(bound, stages.inputs(), StepOptions(trace=True, watch=True))
    assert both.peak_saved == 2 * record.peak_saved > 0


@pytest.mark.parametrize(("ending", "stepped"), [(Ending.STEP, True), (Ending.KEEP, False)])
def test_executor_runs_the_optimizer_only_in_an_ending_with_step(ending, stepped):
    stages = TwoStages()
    executor, bound = alone(stages)
    before = stages.model[0].weight.detach().clone()
    executor.run(bound, stages.inputs(), StepOptions(ending))
    assert torch.equal(stages.model[0].weight, before) is not stepped


def test_executor_adds_to_the_gradients_of_earlier_steps_unless_they_are_cleared():
    stages = TwoStages()
    executor, bound = alone(stages)
    found = []
    for fresh in (True, False, True):
        executor.run(bound, stages.inputs(fresh), StepOptions(Ending.KEEP))
        found.append(stages.model[0].weight.grad.clone())
    torch.testing.assert_close(found[1], 2 * found[0])
    assert torch.equal(found[2], found[0])


def test_executor_records_every_action_in_the_lowered_order():
    stages = TwoStages()
    executor, bound = alone(stages)
    record = executor.run(bound, stages.inputs(), StepOptions(trace=True))
    assert [action for action, *_ in record.events] == list(lower(ONE_DEVICE)[0])
    marks = [record.start_ns, *(at for _, _, start, end, _ in record.events for at in (start, end)), record.end_ns]
    assert marks == sorted(marks)
    assert not executor.run(bound, stages.inputs()).events


def test_executor_calls_before_update_after_the_last_backward_and_before_the_step():
    stages = TwoStages()
    executor, bound = alone(stages)
    before, seen = stages.model[0].weight.detach().clone(), []

    def look(record):
        held = [run.held(m) for run in stages.runs.values() for m in range(2)]
        seen.append((any(held), torch.equal(stages.model[0].weight, before), len(record.results)))

    executor.run(bound, stages.inputs(), before_update=look)
    assert seen == [(False, True, 2)]
    assert not torch.equal(stages.model[0].weight, before)


def test_executor_keeps_only_the_results_that_store_result_does_not_store():
    stages = TwoStages()
    executor, bound = alone(stages)
    taken = []

    def take(name, microbatch, value):
        taken.append((microbatch, value.shape))
        return microbatch == 0

    inputs = stages.inputs()
    inputs.store_result = take
    record = executor.run(bound, inputs)
    assert taken == [(0, torch.Size([])), (1, torch.Size([]))]
    assert [microbatch for _, microbatch in record.results] == [1]


def test_executor_loads_a_tensor_that_microbatches_share_once():
    class Loading(HostQueue):
        loads: list[int]

        def load(self, values):
            self.loads.append(len(values))
            return super().load(values)

    stages, queue = TwoStages(), Loading()
    queue.loads = []
    executor, bound = alone(stages, queue=queue)
    executor.run(bound, stages.inputs())
    assert queue.loads == [1, 1]
    queue.loads.clear()
    stages.pieces[1] = evolve(stages.pieces[1], leaves=stages.pieces[0].leaves)
    executor.run(bound, stages.inputs())
    assert queue.loads == [1]


def test_executors_of_two_devices_exchange_activations_and_gradients_and_keep_no_message():
    stages = TwoStages()
    expected = stages.alone()
    executors = [stages.executor(TWO_DEVICES, end) for end in connect(2)]
    bounds = [bound_on(stages, TWO_DEVICES, executor) for executor in executors]
    with ThreadPoolExecutor(2) as threads:
        running = [
            threads.submit(executor.run, bound, stages.inputs(), StepOptions(trace=True))
            for executor, bound in zip(executors, bounds, strict=True)
        ]
        records = [each.result(60) for each in running]
    assert_same_gradients(stages.model, expected)
    for bound, record, actions in zip(bounds, records, lower(TWO_DEVICES), strict=True):
        assert [action for action, *_ in record.events] == list(actions)
        moved = {size for action, _, _, _, size in record.events if action.peer is not None}
        assert moved == {2 * 8 * 4}  # two rows of 8 numbers in float32
        assert {action for action, *_ in record.events if action.kind.value.startswith("RECV")} == set(record.arrivals)
        messages = [one.message for one in bound.compute if one.message is not None]
        assert len(messages) == 4
        assert all(message.handle is None and message.tensors is None for message in messages)
