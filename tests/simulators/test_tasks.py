"""Tasks by hand: when they start and end, who waits for them, and what each kind moves."""

import pytest
from panpipe.core.actions import Kind, parse_action
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.costs import StageCosts
from panpipe.core.plan.items import Item, Task
from panpipe.core.plan.lowering import lower
from panpipe.core.plan.plan import TiedWeight
from panpipe.core.plan.queues import queues_of
from panpipe.simulators.collectives import Collective
from panpipe.simulators.device import DeviceQueue
from panpipe.simulators.network.network import Network
from panpipe.simulators.tasks import RunningTask, moved_by, run_tasks, task_times
from simpy import Environment
from simpy.events import Timeout

from ..support.plans import orders, plan_of

COSTS = [StageCosts(1.0, 1.0, 1.0, gradient_bytes=40, parameter_bytes=40)] * 2
CLUSTER = fully_connected(2, 10**6, 10.0, 1.0)


def task(*items: Item, readers=(), order=("x", 0)) -> Task:
    return Task(Kind.SYNC, "a task", "a reason", items, readers, order)


def item(device: int, *waits: int) -> Item:
    return Item(device, "queue", parse_action(f"{device}SYNC"), 0, 0, waits)


class Hand:
    """Two devices with one operation each, and tasks of given durations, joined by hand."""

    def __init__(self, *tasks: tuple[Task, float]) -> None:
        self.environment = Environment()
        network = Network(self.environment)
        self.devices = [DeviceQueue(self.environment, [1.0]) for _ in range(2)]
        self.tasks: list[RunningTask] = []
        for each, seconds in tasks:
            ahead = self.tasks[-1] if self.tasks else None
            self.tasks.append(RunningTask(each, Collective(network, (), seconds), 0.0, self.devices, ahead))
        for device in self.devices:
            device.begin()

    def join(self, second: float, number: int, member: int) -> None:
        Timeout(self.environment, second).callbacks.append(lambda _: self.tasks[number].join(member))

    def run(self) -> list[tuple[float, float]]:
        self.environment.run()
        return [(each.collective.start_s, each.collective.end_s) for each in self.tasks]


def test_task_starts_when_all_of_its_items_have_joined_and_its_readers_wait_for_its_end():
    hand = Hand((task(item(0), item(1), readers=((1, 0),)), 2.0))
    hand.join(1.0, 0, 0)
    hand.join(4.0, 0, 1)
    assert hand.run() == [(4.0, 6.0)]
    assert hand.tasks[0].joined_s == [1.0, 4.0]
    assert [device.starts for device in hand.devices] == [[0.0], [6.0]]


def test_tasks_of_one_order_run_one_after_another():
    hand = Hand((task(item(0)), 2.0), (task(item(1)), 1.0))
    hand.join(0.0, 1, 0)  # there first, and waits for the one before it
    hand.join(3.0, 0, 0)
    ended = []
    for number, each in enumerate(hand.tasks):
        each.on_end.append(lambda number=number: ended.append((number, hand.environment.now)))
    assert hand.run() == [(3.0, 5.0), (5.0, 6.0)]
    assert ended == [(0, 5.0), (1, 6.0)]


def test_item_that_waits_for_another_task_joins_when_that_has_ended_too():
    hand = Hand((task(item(0)), 2.0), (task(item(1, 0)), 1.0))
    hand.tasks[1].ahead = None
    hand.tasks[0].on_end[:] = [lambda: hand.tasks[1].join(0)]
    hand.join(0.0, 1, 0)
    hand.join(1.0, 0, 0)
    assert hand.run() == [(1.0, 3.0), (3.0, 4.0)]


def started(plan, costs=COSTS):
    """All tasks of a plan, run with their devices."""
    environment = Environment()
    network = Network(environment)
    queues = queues_of(plan, lower(plan)).replicated(plan.mesh.data)
    devices = [DeviceQueue(environment, [1.0] * len(compute)) for compute in queues.compute]
    running = run_tasks(network, plan, costs, plan.prediction.cluster, queues, devices)
    network.find_shared()
    for device in devices:
        device.begin()
    environment.run()
    assert all(device.done for device in devices)
    return task_times(running)


def test_gradients_of_two_replicas_are_summed_after_their_last_backward():
    plan = plan_of(orders("0F0 0B0"), (0,), costs=COSTS[:1], cluster=CLUSTER, data=2)
    found = started(plan, COSTS[:1])
    assert [(each.device, str(each.action), each.issued_s, each.bytes) for each in found] == [
        (0, "0REDUCE_GRAD", 2.0, 40),
        (1, "0REDUCE_GRAD", 2.0, 40),
    ]
    # Two halves each way: 2 × (20 B at 10 B/s and a second of latency).
    assert {each.end_s for each in found} == {8.0}


def test_a_tied_weight_goes_to_its_first_stage_and_back():
    tied = (TiedWeight("embedding", (0, 1), 20),)
    plan = plan_of(orders("0F0 0B0", "1F0 1B0"), (0, 1), costs=COSTS, cluster=CLUSTER, tied=tied)
    (one,) = [each for each in queues_of(plan, lower(plan)).tasks if each.kind is Kind.REDUCE_TIED]
    steps, size, seconds = moved_by[Kind.REDUCE_TIED](one, plan, COSTS, CLUSTER)
    assert [[(phase.bytes, phase.latency_s) for phase in step] for step in steps] == [[(20, 1.0)], [(20, 1.0)]]
    assert (size, seconds) == (20, 0.0)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_tied_weight_of_stages_on_one_device_moves_nothing(devices):
    rows = orders("0F0 1F0 1B0 0B0") if devices == 1 else orders("0F0 0B0", "1F0 1B0")
    plan = plan_of(rows, (0, devices - 1), costs=COSTS, cluster=CLUSTER, tied=(TiedWeight("embedding", (0, 1), 20),))
    (one,) = [each for each in queues_of(plan, lower(plan)).tasks if each.kind is Kind.REDUCE_TIED]
    steps, _, _ = moved_by[Kind.REDUCE_TIED](one, plan, COSTS, CLUSTER)
    assert len(steps) == (0 if devices == 1 else 2)
