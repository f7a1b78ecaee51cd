"""Searches in which replicas share optimizers."""

import random

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.cluster.cluster import Cluster, Device, Hub, fully_connected
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.errors import RequestError
from panpipe.core.policies.sharding import LEVELS, replica_costs
from panpipe.core.schedules.registry import find_family
from panpipe.core.search.annealing.initial_walks import InitialWalks
from panpipe.core.search.choose import search_plans
from panpipe.core.search.finalize import draft
from panpipe.core.search.problem.oracle import longest_path
from panpipe.core.search.problem.setting import FixedStages, one_setting
from panpipe.core.search.problem.workload import workload_of
from panpipe.core.search.search_options import SearchOptions
from panpipe.core.search.suggestions.infeasible import NothingFits
from panpipe.core.validation.validate import validate
from panpipe.simulators.run import simulate

GRAPH = OpGraph(
    tuple(
        OpNode(f"n{i}", 0.01, 0.01, 0.01, optimizer_s=0.01, parameter_bytes=size, state_bytes=4 * size, saved_bytes=10)
        for i, size in enumerate((1000, 1000, 3000, 1000))
    ),
    tuple(OpEdge(f"n{i}", f"n{i + 1}", 10) for i in range(3)),
)
MEMORY = 14_000
FINE = OpGraph(
    tuple(
        OpNode(f"n{i}", 0.01, 0.01, 0.01, optimizer_s=0.01, parameter_bytes=500, state_bytes=2000, saved_bytes=10)
        for i in range(16)
    ),
    tuple(OpEdge(f"n{i}", f"n{i + 1}", 10) for i in range(15)),
)
"""Its stages of 8 hold 16,000 bytes; 12,000 if replicas share optimizers, and 11,000 if they share gradients, too."""


def found(shard, memory=MEMORY, mesh=(2, 2), family="1f1b", graph=GRAPH):
    cluster = Cluster(
        tuple(Device(f"g{i}", memory) for i in range(4)), (Hub("sw"),),
        tuple(Link(f"g{i}", "sw", 1e6, 1e-6) for i in range(4)),
    )  # fmt: skip
    options = SearchOptions(families=[find_family(family)], anneal=False, budget=50, shard=shard, max_chunks=1)
    return search_plans(workload_of(graph, cluster, 8), cluster, options, meshes=[mesh]).best


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


FAMILIES = tuple(map(find_family, ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v")))


def random_graph(seed):
    """A chain with a skip, a tied weight that is frozen in some, operators without parameters and with frozen ones."""
    draw = random.Random(seed)
    frozen = draw.random() < 0.5
    nodes = []
    for i in range(10):
        size = draw.choice([0, 100, 400, 1000])
        more = {"parameters": (f"w{i}",), "trained_bytes": draw.choice([None, size // 4])} if size else {}
        if i in (2, 8):
            own = 300 if i == 2 else 0
            more = {"parameters": ("tied",), "frozen": ("tied",) if frozen else ()}
            more["trained_bytes"] = 0 if frozen else None
            size = own
        state = size if i in (2, 8) and frozen else draw.choice([2, 4]) * size
        nodes.append(
            OpNode(
                f"n{i}", *(draw.uniform(0.5, 2) for _ in range(3)), draw.uniform(0, 1), size, state, draw.randint(0, 9),
                **more,
            )
        )  # fmt: skip
    edges = [OpEdge(f"n{i}", f"n{i + 1}", draw.randint(0, 20)) for i in range(9)]
    return OpGraph(tuple(nodes), (*edges, OpEdge("n0", "n9", 7)))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(LEVELS[:-1]), st.booleans(), st.booleans())  # it times no runs
def test_search_times_what_replicas_share_as_the_oracle_and_the_simulator_do(seed, level, fixed, contended):
    cluster = fully_connected(4, 10**9, 300.0, 0.01)
    places = ((0, 1), (2, 3))
    setting = one_setting(random_graph(seed), cluster, 5, [1e9] * 4, {"tied": 300}, places)
    for walk in InitialWalks([setting], SearchOptions(families=FAMILIES, max_chunks=2)).published():
        if fixed:
            stages, costs, edges = setting.staged(walk.best.cuts.tolist(), walk.best.placement.tolist())
            walk.setting = evolve(setting, fixed=FixedStages(stages, costs, edges))
        walk.setting = evolve(walk.setting.sharded(level), contended=contended)
        walk.best.recompute[::2] = seed % 2
        walk.evaluate()
        plan, costs = draft(walk)
        assert set(plan.shard) == ({level} if level != "none" else set())
        untied = evolve(plan, tied=())  # the search does not time the sums of tied weights
        expected = simulate(untied, costs, cluster) if contended else longest_path(plan, costs, cluster)
        assert walk.step_s == pytest.approx(expected.step_s, rel=1e-9)


@pytest.mark.parametrize(
    ("memory", "levels"),
    [(17_000, {"none"}), (12_500, {"optimizer"}), (11_500, {"gradients"})],
)
def test_auto_shares_no_more_than_fits(memory, levels):
    plan = found("auto", memory, graph=FINE)
    assert set(plan.shard or ("none",)) == levels
    assert max(validate(plan).peak_memory_bytes) <= memory
    assert validate(plan).peak_memory_bytes == pytest.approx(plan.predicted.peak_memory_bytes, rel=0.01)


def test_shared_gradients_fit_where_shared_optimizers_do_not():
    with pytest.raises(NothingFits):
        found("optimizer", 11_500, graph=FINE)
    plan = found("gradients", 11_500, graph=FINE)
    assert plan.shard == ("gradients",) * 2
    assert sum(cost.gradient_bytes for cost in plan.predicted.costs) == 8000  # of whole stages
    assert [cost.gradient_bytes for cost in replica_costs(plan, plan.predicted.costs)] == [2000 + 1000] * 2
    with pytest.raises(NothingFits, match="needs"):
        found("auto", 10_500, graph=FINE)


def test_auto_takes_a_level_that_shares_more_where_that_is_faster():
    heavy = evolve(FINE, nodes=tuple(evolve(node, saved_bytes=400) for node in FINE.nodes))
    optimizer, gradients, auto = (found(shard, 17_900, graph=heavy) for shard in ("optimizer", "gradients", "auto"))
    assert auto.predicted.step_s == gradients.predicted.step_s < 0.95 * optimizer.predicted.step_s
    assert sorted(auto.shard) == ["gradients", "optimizer"]
    assert max(validate(auto).peak_memory_bytes) <= 17_900


def test_shared_parameters_need_several_stages_on_a_device_and_fit_where_nothing_else_does():
    cluster = Cluster(
        tuple(Device(f"g{i}", 9_500) for i in range(4)), (Hub("sw"),),
        tuple(Link(f"g{i}", "sw", 1e6, 1e-6) for i in range(4)),
    )  # fmt: skip

    def plan(shard):
        families = [find_family("interleaved-1f1b"), find_family("looped")]
        options = SearchOptions(families=families, budget=2000, shard=shard)
        return search_plans(workload_of(FINE, cluster, 8), cluster, options, meshes=[(2, 2)]).best

    with pytest.raises(NothingFits):
        plan("gradients")
    for shard in ("parameters", "auto"):
        chosen = plan(shard)
        assert "parameters" in chosen.shard
        assert len(chosen.stages) > 2
        assert max(validate(chosen).peak_memory_bytes) <= 9_500
        assert simulate(chosen).step_s == pytest.approx(chosen.predicted.step_s, rel=0.05)


def test_shared_parameters_include_frozen_ones():
    """Three quarters of the parameters are frozen: only where they are shared, too, a device holds its stages."""
    nodes = tuple(evolve(node, parameter_bytes=2000, trained_bytes=500, state_bytes=3500) for node in FINE.nodes)
    graph, memory = evolve(FINE, nodes=nodes), 17_000
    with pytest.raises(NothingFits):
        found("gradients", memory, family="looped", graph=graph)
    for shard in ("parameters", "auto"):
        cluster = Cluster(
            tuple(Device(f"g{i}", memory) for i in range(4)), (Hub("sw"),),
            tuple(Link(f"g{i}", "sw", 1e6, 1e-6) for i in range(4)),
        )  # fmt: skip
        options = SearchOptions(families=[find_family("looped")], budget=2000, shard=shard)
        plan = search_plans(workload_of(graph, cluster, 8), cluster, options, meshes=[(2, 2)]).best
        assert "parameters" in plan.shard
        assert max(validate(plan).peak_memory_bytes) <= memory
        assert validate(plan).peak_memory_bytes == pytest.approx(plan.predicted.peak_memory_bytes, rel=0.01)
        assert simulate(plan).step_s == pytest.approx(plan.predicted.step_s, rel=0.05)
