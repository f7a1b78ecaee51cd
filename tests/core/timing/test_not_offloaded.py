"""What stays on the devices of a plan that offloads, with the reasons, by hand."""

from attrs import evolve
from panpipe.core.cluster.cluster import Device, fully_connected
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.costs import StageCosts
from panpipe.core.timing.not_offloaded import NO_HOST, NOT_CHOSEN, TOO_SHORT, NotOffloaded
from panpipe.simulators.run import simulate

from ...support.plans import hosted, leaves, orders, plan_of

COST = StageCosts(1.0, 1.0, 1.0, saved_bytes=100, input_bytes=1)
LINK = Link("device0", "alone", 100.0, 0.0)
HOST = hosted(fully_connected(1, 10**6, 1.0, 0.0), 100.0, latency_s=0.25)


def kept(row, placement, *offload, recompute=(), cost=COST):
    plan = plan_of(
        orders(row), placement, costs=[cost] * len(placement), cluster=HOST, offload=offload, recompute=recompute
    )
    return simulate(plan).kept


def test_microbatch_that_comes_back_at_once_cannot_leave():
    found = kept("0F0 0F1 0F2 0B2 0B1 0B0", (0,), leaves(0, 100, "0: 0F1 0B1"))
    assert found == (
        NotOffloaded(0, 1, 100, TOO_SHORT, (0.0, 0.0), 2.5),
        NotOffloaded(0, 1, 100, NOT_CHOSEN),
    )


def test_tensors_of_a_device_without_a_host_stay():
    cluster = evolve(HOST, devices=(*HOST.devices, Device("alone", 10**6)), links=(*HOST.links, LINK))
    rows = orders("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")
    plan = plan_of(rows, (0, 1), costs=[COST] * 2, cluster=cluster, offload=(leaves(0, 100, "1: 0F2 0F2"),))
    assert NotOffloaded(1, 3, 100, NO_HOST) in simulate(plan).kept
