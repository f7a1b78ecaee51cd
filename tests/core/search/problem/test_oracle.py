"""The search's own oracle, by hand: steps, peaks, replicas and the end of a step."""

from attrs import evolve
from panpipe.core.cluster.cluster import Cluster, Device, fully_connected
from panpipe.core.cluster.mesh import Mesh
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.costs import StageCosts
from panpipe.core.search.problem.oracle import longest_path

from ....support.plans import orders, plan_of

COST = StageCosts(1.0, 1.0, 1.0, optimizer_s=0.5, parameter_bytes=40, saved_bytes=100, workspace_bytes=7)
ROWS = orders("0F0 0B0", "1F0 1B0")
COSTS = (COST, COST)


def test_step_is_the_longest_path_with_the_devices_own_optimizer_step():
    cluster = fully_connected(2, 10**6, 10.0, 1.0)  # 10 bytes take 2 s
    score = longest_path(plan_of(ROWS, (0, 1)), COSTS, cluster)
    assert score.step_s == 1 + 2 + 1 + 2 + 2 + 2 + 0.5
    assert (score.peak_memory_bytes, score.peak_saved_bytes) == ((147, 147), (100, 100))
    assert score.bubble_ratio == 1 - 3 / 10.5


def test_stages_that_recompute_run_and_hold_again():
    cluster = fully_connected(2, 10**6, float("inf"), 0.0)
    costs = (evolve(COST, recompute_s=0.75, input_bytes=30), COST)
    score = longest_path(plan_of(orders("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), (0, 1), recompute=(0,)), costs, cluster)
    assert score.peak_saved_bytes == (130, 100)
    assert score.peak_memory_bytes[0] == 40 + 130 + 7


def test_step_is_that_of_the_slowest_replica_on_its_own_devices():
    links = (Link("d0", "d1", float("inf"), 0.0), Link("d2", "d3", float("inf"), 3.0), Link("d0", "d2", 1.0, 9.0))
    cluster = Cluster(tuple(Device(f"d{i}", 10**6) for i in range(4)), (), links)
    plan = plan_of(ROWS, (0, 1))
    assert longest_path(plan, COSTS, cluster).step_s == 6.5
    assert longest_path(evolve(plan, mesh=Mesh(2, 1, ((2, 3),))), COSTS, cluster).step_s == 6.5 + 2 * 3.0
    assert longest_path(evolve(plan, mesh=Mesh(2, 2)), COSTS, cluster).step_s == 6.5 + 2 * 3.0


def test_sync_makes_every_step_wait_for_all_stages():
    cluster = fully_connected(2, 10**6, float("inf"), 0.5)
    plan = plan_of(ROWS, (0, 1))
    local, synced = (longest_path(each, COSTS, cluster).step_s for each in (plan, evolve(plan, sync=True)))
    assert local == 7.5
    assert synced == 7.5 + 2 * 0.5


def test_device_without_a_stage_holds_and_computes_nothing():
    cluster = fully_connected(2, 10**6, float("inf"), 0.0)
    score = longest_path(plan_of(orders("0F0 0B0", ""), (0,)), (COST,), cluster)
    assert (score.step_s, score.peak_memory_bytes) == (3.5, (147, 0))
