"""Structure, hosts' memory and offload, one wrong thing at a time; intervals of predictions."""

import attrs
import pytest
from attrs import evolve
from panpipe.core.cluster.cluster import Cluster, Device, Hub, fully_connected
from panpipe.core.cluster.mesh import Mesh
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.costs import StageEdge
from panpipe.core.errors import InfeasibleError, PanpipeError, RequestError
from panpipe.core.lowering.derive import forward_only
from panpipe.core.plan.memory_policy import StageOffload
from panpipe.core.plan.plan import MemoryPolicy, Stage, TiedWeight
from panpipe.core.validation.host_memory import check_host_memory
from panpipe.core.validation.structure import check_structure
from panpipe.core.validation.validate import validate

from ...support.plans import UNIT, hosted, leaves, orders, plan_of

# Structure: stages, edges, tied weights, memory policy and compute orders, one wrong thing at a time.


PLAN = plan_of(orders("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), (0, 1))


def with_orders(*rows):
    return attrs.evolve(PLAN, device_actions=orders(*rows))


def with_costs(**changes):
    return attrs.evolve(PLAN, prediction=attrs.evolve(PLAN.prediction, costs=(attrs.evolve(UNIT, **changes), UNIT)))


BAD_PLANS = {
    r"mesh is 0 × 1": attrs.evolve(PLAN, mesh=Mesh(0)),
    r"0 microbatches": attrs.evolve(PLAN, microbatches=0),
    r"no stages": attrs.evolve(PLAN, stages=()),
    r"orders the actions of 2 devices and its mesh has 3": attrs.evolve(PLAN, mesh=Mesh(3)),
    r"stage 4 is at position 1": attrs.evolve(PLAN, stages=(PLAN.stages[0], Stage(4, 1, ("a",)))),
    r"stage 1 is on device 7": attrs.evolve(PLAN, stages=(PLAN.stages[0], Stage(1, 7, ("a",)))),
    r"edge 1 → 0 is not from a stage to a later one": attrs.evolve(PLAN, edges=(StageEdge(1, 0, 1, 1),)),
    r"edge 0 → 1 is listed twice": attrs.evolve(PLAN, edges=PLAN.edges * 2),
    r"edge 0 → 1 has -1 and 0 bytes": attrs.evolve(PLAN, edges=(StageEdge(0, 1, -1, 0),)),
    r"tied weight 'w' has stages \[0\]": attrs.evolve(PLAN, tied=(TiedWeight("w", (0,), 1),)),
    r"tied weight 'w' has stages \[0, 5\] of 2": attrs.evolve(PLAN, tied=(TiedWeight("w", (0, 5), 1),)),
    r"forward_s of stage 0 is -1": with_costs(forward_s=-1.0),
    r"saved_bytes of stage 0 is nan": with_costs(saved_bytes=float("nan")),
    r"costs of 1 stages and the plan has 2": attrs.evolve(
        PLAN, prediction=attrs.evolve(PLAN.prediction, costs=(UNIT,))
    ),
    r"needs 2 devices and the cluster has 1": attrs.evolve(
        PLAN, prediction=attrs.evolve(PLAN.prediction, cluster=fully_connected(1, 9, 1.0, 0.0))
    ),
    r"0STEP in the order of device 0 is not compute": with_orders("0F0 0F1 0B0 0B1 0STEP", "1F0 1B0 1F1 1B1"),
    r"9F0 in the order of device 0 names no stage": with_orders("0F0 0F1 0B0 0B1 9F0", "1F0 1B0 1F1 1B1"),
    r"0F2 in the order of device 0 names no microbatch": with_orders("0F0 0F1 0F2 0B0 0B1", "1F0 1B0 1F1 1B1"),
    r"1F0 in the order of device 0 is on the wrong device": with_orders("0F0 0F1 1F0 0B0 0B1", "1B0 1F1 1B1"),
    r"0F1 is listed twice": with_orders("0F0 0F1 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"),
    r"1F1 is missing": with_orders("0F0 0F1 0B0 0B1", "1F0 1B0 1B1"),
    r"stage 1 has no backward for microbatch 1": with_orders("0F0 0F1 0B0 0B1", "1F0 1B0 1F1"),
    r"stage 1 has I for microbatch 1": with_orders("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1I1"),
    r"stage 1 has B, W for microbatch 1": with_orders("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1 1W1"),
    r"1B0 is before 1F0 on device 1": with_orders("0F0 0F1 0B0 0B1", "1B0 1F0 1F1 1B1"),
    r"1W0 is before 1I0 on device 1": with_orders("0F0 0F1 0B0 0B1", "1F0 1W0 1I0 1F1 1B1"),
    r"1F0 is after 1F1 on device 1: within a stage F ascends": with_orders("0F0 0F1 0B0 0B1", "1F1 1F0 1B0 1B1"),
}


@pytest.mark.parametrize("message", BAD_PLANS)
def test_plan_with_a_wrong_structure_is_refused_in_one_line(message):
    with pytest.raises(RequestError, match=message) as error:
        check_structure(BAD_PLANS[message])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("stages", [(2,), (-1,), (1, 0), (0, 0)])
def test_memory_policy_of_stages_that_do_not_exist_or_are_not_in_order_is_refused(stages):
    offload = tuple(StageOffload(stage, (), ()) for stage in stages)
    for name, policy in (("recompute", MemoryPolicy(recompute=stages)), ("offload", MemoryPolicy(offload=offload))):
        with pytest.raises(RequestError, match=rf"memory\.{name} names stages .* stages go from 0 to 1"):
            check_structure(attrs.evolve(PLAN, memory=policy))


FORWARD = forward_only(PLAN)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"memory": MemoryPolicy(recompute=(0,))}, r"has memory\.recompute: 0;"),
        ({"memory": MemoryPolicy(offload=(StageOffload(1, (), ()),))}, r"has memory\.offload: 1;"),
        ({"tied": (TiedWeight("w", (0, 1), 8),)}, "has tied: w;"),
        ({"sync": True}, "has sync: true;"),
        ({"edges": (StageEdge(0, 1, 8, 4),)}, "has edges with gradients: 0 → 1;"),
        ({"device_actions": PLAN.device_actions}, "stage 0 has B for microbatch 0 and the plan is forward only"),
    ],
)
def test_forward_only_plan_has_nothing_of_a_backward(changes, said):
    with pytest.raises(RequestError, match=said):
        check_structure(attrs.evolve(FORWARD, **changes))


def test_each_kind_of_backward_out_of_order_is_one_warning_a_stage():
    plan = plan_of(orders("0F0 0F1 0F2 0B2 0B1 0B0", "1F0 1F1 1F2 1I1 1I0 1I2 1W0 1W1 1W2"), (0, 1))
    assert [warning.split(":")[0] for warning in check_structure(plan)] == [
        "0B1 is after 0B2 on device 0",
        "1I0 is after 1I1 on device 1",
    ]


# Hosts' memory: what does not fit is refused with what would; several devices share a host.


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
