"""Meshes, sizes of microbatches, places, recomputation and blocks, chosen with everything else."""

import itertools
from itertools import pairwise

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from panpipe.core.cluster.cluster import Cluster, Device, fully_connected
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.costs import stage_costs
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.errors import RequestError
from panpipe.core.schedules.registry import families, find_family
from panpipe.core.search import longest_path
from panpipe.core.search.choose import plan, search_plans
from panpipe.core.search.problem.arrangements import arrangements, nearest_order
from panpipe.core.search.problem.assemble import with_replicas
from panpipe.core.search.problem.blocks import Blocks
from panpipe.core.search.problem.workload import Workload, meshes, workload_of
from panpipe.core.search.search_options import SearchOptions
from panpipe.core.search.suggestions.infeasible import NothingFits

# Meshes, sizes of microbatches, devices' places, kinds of devices and recomputation, chosen with everything else.


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


# Operators that stay together cost what they do as a stage, and plans of blocks name operators.


@st.composite
def layered(draw):
    """A graph of layers of some operators, with skip edges, several readers of a tensor, frozen parameters, and a tied
    parameter whose state is that of its first reader."""
    numbers, states = st.integers(0, 9), st.sampled_from([4, 8, 12, 13])
    names = [f"layers.{i}.part{j}/mm" for i in range(draw(st.integers(2, 4))) for j in range(draw(st.integers(1, 3)))]
    names = ["embedding/e", *names, "/loss"]
    nodes = [
        OpNode(name, *(float(draw(numbers)) + 1 for _ in range(4)), 4, 0 if name == "/loss" else draw(states),
               *(draw(numbers) for _ in range(2)), ("tied",) if name in ("embedding/e", "/loss") else (f"p.{name}",))
        for name in names
    ]  # fmt: skip
    edges = [OpEdge(a, b, draw(numbers), draw(st.booleans())) for a, b in pairwise(names)]
    for _ in range(draw(st.integers(0, 4))):
        i, j = sorted(draw(st.lists(st.integers(0, len(names) - 1), min_size=2, max_size=2, unique=True)))
        edges.append(OpEdge(names[i], names[j], 5, True, draw(st.integers(1, 2))))
    return OpGraph(tuple(nodes), tuple(edges), name="layered")


@given(layered())
def test_plans_of_blocks_name_operators_and_end_between_layers(graph):
    blocks = Blocks.of(graph, "layers")
    options = SearchOptions(families=[find_family("1f1b")], budget=50)
    found = plan(blocks.joined(graph), fully_connected(2, 10**6, 10.0, 0.1), 2, options, parameter_sizes=blocks.sizes)
    expanded = blocks.expanded(found)
    assert expanded.graph_hash == graph.hash
    assert [name for stage in expanded.stages for name in stage.nodes] == [node.name for node in graph.nodes]
    starts = {names[0] for names in blocks.operators}
    assert all(stage.nodes[0] in starts for stage in expanded.stages)
    costs = stage_costs(graph, [stage.nodes for stage in expanded.stages])
    assert with_replicas(graph, costs, found.tied) == found.predicted.costs


def test_more_devices_than_blocks_are_refused():
    graph = OpGraph(tuple(OpNode(f"layers.{i}/{part}", 1.0) for i in range(3) for part in "ab"))
    with pytest.raises(
        RequestError, match=r"there are 4 devices for 3 layers and parts around them.*at most 3 devices"
    ):
        Blocks.of(graph, "layers").refuse_too_few(4)
    Blocks.of(graph, "operators").refuse_too_few(4)
