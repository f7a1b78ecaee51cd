"""Searches in which replicas share optimizers."""

import pytest
from attrs import evolve
from panpipe.core.cluster.cluster import Cluster, Device, Hub
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.errors import RequestError
from panpipe.core.plan.sharding import replica_costs
from panpipe.core.plan.validation.validate import validate
from panpipe.core.schedules.registry import find_family
from panpipe.core.search.choose import search_plans
from panpipe.core.search.problem.workload import counted
from panpipe.core.search.search_options import SearchOptions
from panpipe.core.search.suggestions.infeasible import NothingFits

GRAPH = OpGraph(
    tuple(
        OpNode(f"n{i}", 0.01, 0.01, 0.01, optimizer_s=0.01, parameter_bytes=size, state_bytes=4 * size, saved_bytes=10)
        for i, size in enumerate((1000, 1000, 3000, 1000))
    ),
    tuple(OpEdge(f"n{i}", f"n{i + 1}", 10) for i in range(3)),
)
MEMORY = 14_000


def found(shard, memory=MEMORY, mesh=(2, 2), family="1f1b"):
    cluster = Cluster(
        tuple(Device(f"g{i}", memory) for i in range(4)), (Hub("sw"),),
        tuple(Link(f"g{i}", "sw", 1e6, 1e-6) for i in range(4)),
    )  # fmt: skip
    options = SearchOptions(families=[find_family(family)], anneal=False, budget=50, shard=shard, max_chunks=1)
    return search_plans(counted(GRAPH, cluster, 8), cluster, options, meshes=[mesh]).best


def test_sharded_plan_fits_where_a_whole_optimizer_does_not():
    with pytest.raises(NothingFits):
        found("none")
    plan = found("optimizer")
    assert plan.shard == ("optimizer",) * 2
    assert sum(cost.optimizer_bytes for cost in plan.predicted.costs) == 12_000  # of whole stages
    assert validate(plan).peak_memory_bytes == pytest.approx(plan.predicted.peak_memory_bytes, rel=0.01)
    assert max(plan.predicted.peak_memory_bytes) <= MEMORY


def test_auto_shards_the_stages_that_do_not_fit_otherwise_and_no_other():
    assert found("auto", 10 * MEMORY).shard == ()
    plan = found("auto")
    assert sorted(plan.shard) == ["none", "optimizer"]
    whole = {s: c.state_bytes for s, c in enumerate(plan.predicted.costs)}
    assert [whole[s] > MEMORY - 50 for s in range(2)] == [level == "optimizer" for level in plan.shard]
    parts = replica_costs(plan, plan.predicted.costs)
    assert all(part.state_bytes <= MEMORY for part in parts)
    assert validate(plan).peak_memory_bytes == pytest.approx(plan.predicted.peak_memory_bytes, rel=0.01)


def test_auto_that_does_not_fit_even_so_names_what_one_replica_holds():
    with pytest.raises(NothingFits, match="needs"):
        found("auto", 9_000)


def test_sharding_of_one_replica_is_refused():
    with pytest.raises(RequestError, match="shard is 'optimizer' and the mesh has one replica"):
        found("optimizer", mesh=(4, 1))
    assert found("auto", mesh=(4, 1)).shard == ()


def test_words_that_are_no_levels_are_refused():
    with pytest.raises(RequestError, match="shard is 'all': give one of 'none', 'optimizer', 'gradients', 'auto'"):
        evolve(SearchOptions(families=[]), shard="all")
