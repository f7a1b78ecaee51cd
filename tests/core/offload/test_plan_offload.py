"""The offload of a plan for a request: what may leave, with which links, limits and queues."""

import pytest
from attrs import evolve
from panpipe.core.cluster.catalog import find_device
from panpipe.core.cluster.cluster import Cluster, Device, Hub, fully_connected
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.costs import StageCosts
from panpipe.core.errors import RequestError
from panpipe.core.offload.choice import everything, of_stages
from panpipe.core.offload.plan_offload import copy_queues, offloadable, picks_of, with_offload
from panpipe.core.plan.memory_policy import Storage

from ...support.plans import hosted, orders, plan_of

ORDER = orders("0F0 0F1 0F2 0F3 0F4 0F5 0B0 0B1 0B2 0B3 0B4 0B5")
COSTS = [StageCosts(1.0, 1.0, 1.0, saved_bytes=300)]
STORAGES = [(Storage("a", 200), Storage("b", 100))]


def plan_on(cluster, **options):
    return plan_of(ORDER, (0,), costs=COSTS, cluster=cluster, **options)


def one_host(bytes_per_s=1e5, memory=None):
    cluster = hosted(fully_connected(1, 10**6, 1.0, 0.0), bytes_per_s)
    return evolve(cluster, hubs=(Hub("host", "host", memory),))


def test_all_that_the_link_carries_leaves_and_the_prediction_is_dropped():
    plan = plan_on(one_host())
    task = offloadable(plan, COSTS, one_host(), STORAGES)
    found = with_offload(plan, task, everything)
    (stage,) = found.memory.offload
    assert {storage.name for storage in stage.storages} == {"a", "b"}
    assert found.prediction is None
    assert with_offload(found, task, everything) is found  # nothing changes


def test_plan_from_which_nothing_leaves_stays_the_same():
    plan = plan_on(one_host())
    assert with_offload(plan, offloadable(plan, COSTS, one_host(), [()]), everything) is plan


def test_times_have_the_messages_and_the_copies_have_the_host_of_the_plans_devices():
    cluster = hosted(fully_connected(2, 10**6, 10.0, 0.5), 50.0, 1.0)
    rows = orders("0F0 0B0", "1F0 1B0")
    plan = plan_of(rows, (0, 1), cluster=cluster)
    task = offloadable(plan, [StageCosts(1.0, 1.0, 1.0, saved_bytes=10)] * 2, cluster, [()] * 2)
    # F ends at 1, a message of 10 bytes takes 1.5 s: stage 1 runs from 2.5 to 5.5.
    assert task.times[0][1] == (2.5, 3.5)
    assert [link.out_bytes_per_s for link in task.links.links] == [50.0, 50.0]
    assert (task.queues, task.host_limits) == (1, None)


@pytest.mark.parametrize(("memory", "data", "limits"), [(None, 1, None), (900, 1, [900.0]), (900, 2, [450.0])])
def test_devices_share_the_memory_of_their_host_equally(memory, data, limits):
    cluster = evolve(hosted(fully_connected(data, 10**6, 1.0, 0.0), 10.0), hubs=(Hub("host", "host", memory),))
    plan = plan_on(cluster, data=data)
    assert offloadable(plan, COSTS, cluster, STORAGES).host_limits == limits


def test_device_that_reaches_no_host_with_a_limit_has_none():
    devices = tuple(Device(f"gpu{i}", 10**6) for i in range(2))
    links = (Link("gpu0", "gpu1", 1.0, 0.0),)
    alone = Cluster(devices, (Hub("host", "host", 100),), links)
    plan = plan_of(orders("0F0 0B0", "1F0 1B0"), (0, 1), cluster=alone)
    task = offloadable(plan, COSTS * 2, alone, [STORAGES[0]] * 2)
    assert task.host_limits == [float("inf")] * 2
    assert task.links.links == (None, None)


def test_requests_become_picks():
    assert picks_of("all", 2) is everything
    for wanted in ("none", {0: 0.5}):
        assert type(picks_of(wanted, 2)) is type(of_stages({}))
    with pytest.raises(RequestError):
        picks_of({2: 0.5}, 2)


def test_number_of_copy_queues_is_that_of_the_device_type():
    plan = plan_on(one_host())
    assert copy_queues(plan, one_host()) == 1  # no type is known
    typed = evolve(one_host(), devices=(Device("device0", 10**6, "A100-40GB"),))
    assert copy_queues(plan, typed) == 1
    two = evolve(find_device("A100-40GB"), name="own", host_copy_queues=2)
    own = evolve(typed, devices=(Device("device0", 10**6, "own"),), types=(two,))
    assert copy_queues(plan, own) == 2
