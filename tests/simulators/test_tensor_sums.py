"""All-reduces over tensor ranks in a simulated step, by hand."""

import pytest
from attrs import evolve
from panpipe.core.cluster.cluster import Cluster, Device
from panpipe.core.cluster.mesh import Mesh
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.costs import StageCosts, StageEdge
from panpipe.core.costs.reductions import TensorReductions
from panpipe.core.errors import RequestError
from panpipe.core.plan.memory_policy import StageOffload, Storage
from panpipe.core.plan.plan import MemoryPolicy
from panpipe.core.search import longest_path
from panpipe.core.validation.structure import check_structure
from panpipe.simulators.alone import alone_s
from panpipe.simulators.run import simulate

from ..support.plans import orders, plan_of


def switch(count, bytes_per_s=100.0):
    """Devices with a port each into one switch, without latency."""
    names = [f"gpu{number}" for number in range(count)]
    links = tuple(Link(name, "switch", bytes_per_s, 0.0) for name in names)
    return Cluster(tuple(Device(name, 10**6) for name in names), ("switch",), links)


# Two ranks: a ring moves 2 · (2 − 1) ÷ 2 of the bytes over each edge, so 200 bytes at 100 bytes/s take 2 s.
SUMS = TensorReductions(2, 2, 200, 200, 2.0, 2.0, ranks=2)
COST = StageCosts(3.0, 3.0, 1.0, reductions=SUMS)


def two_stages(*rows, size=0, **changes):
    plan = plan_of(
        orders(*rows), (0, 1), costs=[COST] * 2, edges=(StageEdge(0, 1, size, max(size, 1)),), cluster=switch(4)
    )
    return evolve(plan, mesh=Mesh(2, 1, tensor=2), **changes)


def test_step_without_contention_is_that_of_the_longest_path():
    plan = two_stages("0F0 0B0", "1F0 1B0")
    result = simulate(plan)
    ends = [end for _, ends in result.operation_times for end in ends[:2]]
    assert ends == pytest.approx([3.0, 14.01, 6.0, 10.0])  # the gradient of one byte takes 0.01 s
    assert longest_path(plan, plan.prediction.costs, plan.prediction.cluster).step_s == pytest.approx(result.step_s)


def test_all_reduce_shares_links_with_messages():
    # The message of 0F0 (300 bytes) leaves at 3 s; the all-reduce of 0F1 (1 s of computation before it) uses the same
    # ports from 4 s on: 200 bytes at half the rate until the message has left, at 8 s. It ends there, in place of 6 s.
    plan = two_stages("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", size=300, microbatches=2)
    (starts, ends), _ = simulate(plan).operation_times
    assert (starts[:2], ends[:2]) == ([0.0, 3.0], [3.0, pytest.approx(8.0)])
    alone = simulate(plan, sharing=False)
    assert alone.operation_times[0][1][1] == pytest.approx(6.0)
    assert alone_s(plan, plan.prediction.costs, alone.cluster) == pytest.approx(alone.step_s)


def test_recompute_repeats_the_all_reduces_of_the_forward():
    plan = two_stages("0F0 0B0", "1F0 1B0", memory=MemoryPolicy(recompute=(0, 1)))
    used = {(link.src, link.dst): link.bytes for link in simulate(plan).links}
    assert used["gpu0", "switch"] == 3 * 200


PLAN = two_stages("0F0 0B0", "1F0 1B0")


def with_costs(cost, mesh=PLAN.mesh):
    return evolve(PLAN, mesh=mesh, prediction=evolve(PLAN.prediction, costs=(cost,) * 2, cluster=switch(8)))


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (with_costs(COST, Mesh(2)), "are of 2 tensor ranks and the mesh has 1: plan again"),
        (with_costs(COST, Mesh(2, tensor=4)), "are of 2 tensor ranks and the mesh has 4: plan again"),
        (
            with_costs(evolve(COST, reductions=None)),
            "the mesh has 2 ranks at a position and the costs are of stages without",
        ),
        (
            with_costs(evolve(COST, reductions=evolve(SUMS, forward_s=3.5))),
            "reductions.forward_s of stage 0 is 3.5",
        ),
        (
            with_costs(evolve(COST, reductions=evolve(SUMS, forward_bytes=-1))),
            "forward_bytes of stage 0 is -1",
        ),
        (
            evolve(PLAN, memory=MemoryPolicy(offload=(StageOffload(0, (Storage("a", 1),), ()),))),
            "memory.offload is not empty and the mesh has 2 ranks a position",
        ),
    ],
)
def test_hand_edit_is_refused(plan, said):
    with pytest.raises(RequestError, match=said):
        check_structure(plan)
