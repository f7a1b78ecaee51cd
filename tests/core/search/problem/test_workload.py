"""Meshes, sizes of microbatches, devices' places, kinds of devices and recomputation, chosen with everything else."""

import itertools

import numpy as np
import pytest
from attrs import evolve
from panpipe.core.cluster.cluster import Cluster, Device, fully_connected
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.schedules.registry import families
from panpipe.core.search import longest_path
from panpipe.core.search.choose import search_plans
from panpipe.core.search.problem.arrangements import arrangements, nearest_order
from panpipe.core.search.problem.workload import Workload, meshes, workload_of
from panpipe.core.search.search_options import SearchOptions
from panpipe.core.search.suggestions.infeasible import NothingFits

ALL = tuple(families().values())
BUDGET = 4000


def chain(count=16, time=1.0, **costs):
    nodes = tuple(OpNode(f"n{i}", time, time, time, parameter_bytes=8, state_bytes=32, **costs) for i in range(count))
    return OpGraph(nodes, tuple(OpEdge(f"n{i}", f"n{i + 1}", 8) for i in range(count - 1)))


def best(work, cluster, meshes=None, **choices):
    options = SearchOptions(**{"families": ALL, "budget": BUDGET} | choices)
    plan = search_plans(work, cluster, options, meshes=meshes).best
    score = longest_path(plan, plan.prediction.costs, cluster)
    assert (score.step_s, score.peak_memory_bytes) == (plan.prediction.step_s, plan.prediction.peak_memory_bytes)
    return plan


def test_replicas_are_chosen_for_fast_links_and_a_pipeline_for_large_gradients():
    graph = chain(saved_bytes=1)
    fast = fully_connected(4, 10**6, 1e9, 0.0)
    plan = best(workload_of(graph, fast, 4), fast, meshes=meshes(4))
    assert (plan.mesh.pipeline, plan.mesh.data, plan.microbatches) == (1, 4, 1)
    heavy = evolve(graph, nodes=tuple(evolve(node, parameter_bytes=800, state_bytes=3200) for node in graph.nodes))
    slow = fully_connected(4, 10**6, 20.0, 0.0)
    plan = best(workload_of(heavy, slow, 16), slow, meshes=meshes(4))
    assert plan.mesh.pipeline > 1


def test_size_of_microbatches_is_chosen():
    """A microbatch takes 1 s for each operator whatever its size: large ones are better until the pipeline is empty."""
    cluster = fully_connected(2, 10**6, 1e9, 0.0)
    asked = []

    def costs(size):
        asked.append(size)
        return (chain(saved_bytes=size),)

    plan = best(Workload(costs, 16, (1, 2, 4, 8, 16), (0, 0)), cluster)
    assert plan.microbatches in (1, 2)
    assert sorted(asked) == [1, 2, 4, 8, 16]
    assert plan.prediction.step_s < 2 * 48
    # Twice the work for twice the size: small ones fill the pipeline.
    plan = best(Workload(lambda size: (chain(time=float(size)),), 16, (1, 2, 4, 8, 16), (0, 0)), cluster)
    assert plan.microbatches >= 8


def bridged():
    """Six devices in pairs 0–3, 1–4 and 2–5 with fast bridges, everything else far."""
    pairs = {(0, 3), (1, 4), (2, 5)}
    links = [Link(f"d{a}", f"d{b}", 1e9 if (a, b) in pairs else 8.0, 0.0) for a in range(6) for b in range(a + 1, 6)]
    return Cluster(tuple(Device(f"d{i}", 10**6) for i in range(6)), (), tuple(links))


def test_neighbouring_stages_are_on_bridged_devices():
    cluster = bridged()
    found = arrangements(cluster, 6, 1)
    distances = np.array([[0.0 if a == b else cluster.transfer_s(a, b, 1e6) for b in range(6)] for a in range(6)])
    order = nearest_order(distances, range(6))
    assert (order,) in found
    assert sum(abs(a - b) == 3 for a, b in itertools.pairwise(order)) == 3
    plan = best(workload_of(chain(12), cluster, 6), cluster, max_chunks=1)
    pairs = [{plan.stages[i].device, plan.stages[i + 1].device} for i in range(5)]
    assert sum(pair in ({0, 3}, {1, 4}, {2, 5}) for pair in pairs) == 3


def test_faster_devices_get_more_work():
    slow, fast = chain(24, 2.0), chain(24, 1.0)
    cluster = fully_connected(3, 10**6, 1e9, 0.0)
    work = Workload(lambda _: (fast, slow), 32, (1,), (0, 1, 0))
    plan = best(work, cluster, max_chunks=1)
    sizes = {stage.device: len(stage.nodes) for stage in plan.stages}
    assert sizes[1] < min(sizes[0], sizes[2])
    assert plan.prediction.costs[plan.placement.index(1)].forward_s == 2 * sizes[1]
    assert plan.prediction.step_s < 1.15 * 32 * 3 * 24 / 2.5


@pytest.mark.slow
def test_stages_recompute_only_if_memory_is_short():
    graph = chain(saved_bytes=40)
    roomy, tight = (fully_connected(4, size, 1e9, 0.0) for size in (10**5, 350))
    assert best(workload_of(graph, roomy, 8), roomy, recompute=None).memory.recompute == ()
    least = fully_connected(4, 150, 1e9, 0.0)
    with pytest.raises(NothingFits):
        search_plans(workload_of(graph, least, 8), least, SearchOptions(families=ALL))
    free = best(workload_of(graph, tight, 8), tight, recompute=None)
    without = best(workload_of(graph, tight, 8), tight)
    assert free.prediction.step_s <= without.prediction.step_s
    smallest = fully_connected(4, 260, 1e9, 0.0)
    assert best(workload_of(graph, smallest, 8), smallest, recompute=None).memory.recompute
    every = best(workload_of(graph, roomy, 8), roomy, recompute="all")
    assert every.memory.recompute == tuple(range(len(every.stages)))
