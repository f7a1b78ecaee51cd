"""When shared parameters are whole: the least memory, what is kept between runs, and early gathers."""

import math

from attrs import evolve
from panpipe.core.cluster.cluster import Cluster, fully_connected
from panpipe.core.plan.plan import Plan
from panpipe.core.search.problem.oracle import longest_path
from panpipe.core.search.unsharded_runs import with_runs

from ...support.plans import orders, plan_of
from ...support.sharing import COST

CLUSTER = fully_connected(2, 10**6, 20.0, 0.0)
"""An all-gather of 80 bytes takes 2 s; F, I and W of `COST` 1 s each."""


def plan(limit: float, cluster: Cluster = CLUSTER) -> Plan:
    made = plan_of(orders("0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"), (0, 0), data=2, costs=[COST] * 2)
    made = evolve(made, shard=("parameters",) * 2, edges=())
    return with_runs(made, [COST] * 2, cluster, [limit])


def runs(found: Plan) -> list[list[str]]:
    return [[f"{run.after or 'start'}: {run.first}-{run.last}" for run in each.runs] for each in found.memory.unshard]


def peak(found: Plan) -> float:
    return longest_path(found, (COST, COST), CLUSTER).peak_memory_bytes[0]


def test_parameters_are_freed_between_runs_where_actions_hide_their_gather() -> None:
    found = plan(math.inf, fully_connected(2, 10**6, 80.0, 0.0))  # 0.5 s
    assert runs(found) == [["start: 0F0-0F1", "1B0: 0B0-0B1"], ["0F0: 1F0-1B1"]]


def test_gathers_start_as_early_as_they_fit_and_are_hidden() -> None:
    least = peak(plan(0.0))
    assert least == 2 * (40 + 40 + 80) + 10 + 80 + 400
    # 80 bytes more: stage 1 is gathered during both forwards of stage 0, and the second run of stage 0 during 1B1.
    found = plan(least + 80)
    assert runs(found)[1] == ["start: 1F0-1B1"]
    assert peak(found) <= least + 80
    assert peak(plan(least)) == least
    assert runs(plan(least)) == [["start: 0F0-0F1", "1B0: 0B0-0B1"], ["start: 1F0-1B1"]]
