"""Hosts' memory: what does not fit is refused with what would; several devices share a host."""

import pytest
from attrs import evolve
from panpipe.core.cluster.cluster import Cluster, Device, Hub, fully_connected
from panpipe.core.cluster.routing import Link
from panpipe.core.errors import InfeasibleError, PanpipeError
from panpipe.core.validation.host_memory import check_host_memory
from panpipe.core.validation.validate import validate

from ...support.plans import hosted, leaves, orders, plan_of

ORDERS = orders("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1B0 1F2 1B1 1B2")
OFFLOAD = [leaves(0, 100, "1: 0F2 0F2", "2: 0B0 0B1"), leaves(1, 60, "1: 1B0 1B0")]


def plan_with(*limits, two_hosts=False, **options):
    devices = 2 * options.get("data", 1)
    cluster = hosted(fully_connected(devices, 10**9, float("inf"), 0.0), 10.0)
    if two_hosts:
        hubs = [Hub(f"host{i}", "host", limits[i]) for i in range(2)]
        links = [link for link in cluster.links if link.b != "host"]
        cluster = Cluster(
            cluster.devices, tuple(hubs), (*links, *(Link(f"device{i}", f"host{i}", 10.0, 0.0) for i in range(2)))
        )
    else:
        cluster = evolve(cluster, hubs=(Hub("host", "host", limits[0]),))
    return plan_of(ORDERS, (0, 1), cluster=cluster, offload=OFFLOAD, **options)


def test_devices_share_the_memory_of_their_host():
    assert validate(plan_with(None)).host_bytes == (256, 64)
    assert validate(plan_with(320)).host_bytes == (256, 64)
    with pytest.raises(InfeasibleError) as refusal:
        validate(plan_with(319))
    assert str(refusal.value) == (
        "host 'host' holds 320 bytes of offloaded tensors of devices 0, 1 and has 319: 1 too many; give it 1 bytes "
        "more, or keep stage 1 on the device (the others need 256)"
    )
    with pytest.raises(InfeasibleError, match=r"keep stage 0 on the device \(the others need 64\)"):
        validate(plan_with(100))
    with pytest.raises(InfeasibleError, match=r"keep stages 0, 1 on the device \(nothing else is offloaded then\)"):
        validate(plan_with(0))


def test_each_host_has_its_own_limit():
    validate(plan_with(256, 64, two_hosts=True))
    with pytest.raises(InfeasibleError, match="host 'host1' holds 64 bytes of offloaded tensors of device 1 and has 9"):
        validate(plan_with(256, 9, two_hosts=True))


def test_replicas_on_one_host_share_its_memory():
    plan = plan_with(640, data=2)
    validate(plan)
    less = evolve(plan.prediction.cluster, hubs=(Hub("host", "host", 639),))
    with pytest.raises(InfeasibleError, match="holds 640 bytes of offloaded tensors of devices 0, 1, 2, 3"):
        check_host_memory(plan, less)


@pytest.mark.parametrize(
    ("hub", "said"),
    [
        (Hub("nic0", "nic", 5), "memory_bytes of 'nic0' is 5: only hubs of kind host have memory"),
        (Hub("host", "host", -1), "memory_bytes of 'host' is -1: it must be at least 0"),
    ],
)
def test_bad_memory_of_a_hub_is_refused(hub, said):
    with pytest.raises(PanpipeError, match=said):
        Cluster((Device("gpu0", 1),), (hub,))
