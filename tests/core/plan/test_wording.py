"""The size of a plan as text."""

from attrs import evolve
from panpipe.core.cluster.mesh import Mesh
from panpipe.core.plan.wording import plan_size

from ...support.plans import scheduled


def test_plan_size_with_and_without_replicas():
    plan = scheduled("1f1b", 2, 4)
    assert plan_size(plan) == "2 stages on 2 devices, 4 microbatches"
    assert plan_size(evolve(plan, mesh=Mesh(2, 3))) == "2 stages on 3 × 2 devices, 4 microbatches"
    assert plan_size(scheduled("1f1b", 1, 1)) == "1 stage on 1 device, 1 microbatch"
