"""Plans with offload: what is asked for, and under one memory limit the fastest of everything."""

import itertools

import pytest
from attrs import evolve
from panpipe.core.errors import InfeasibleError, RequestError
from panpipe.core.offload.choice import everything
from panpipe.core.offload.plan_offload import graph_storages, offloadable, with_offload
from panpipe.core.plan.plan import plan_json
from panpipe.core.schedules.registry import find_family
from panpipe.core.search.choose import plan
from panpipe.core.search.search_options import SearchOptions
from panpipe.core.validation.validate import validate
from panpipe.simulators.oracle import simulated

from ...support.offload_clusters import SAVED, cluster_with_hosts, uniform_graph

DEVICES, MICROBATCHES = 4, 8
ALL = tuple(map(find_family, ("1f1b", "interleaved-1f1b", "gis-h", "po-h", "po-f")))
RESIDENT = tuple(family for family in ALL if not family.offloads)
ONE_F_ONE_B = 2 * DEVICES * SAVED
"""Saved tensors that 1F1B holds of eight layers on four devices."""
STATE = (8 << 20) + (1 << 20)


def planned(k, offload, limit=None, families=ALL, **more):
    options = {"budget": 300, "recompute": "none", **more}
    wanted = RESIDENT if offload == "none" and families is ALL else families
    options = SearchOptions(families=wanted, offload=offload, memory_limit=limit, **options)
    return plan(uniform_graph(8, k), cluster_with_hosts(DEVICES), MICROBATCHES, options)


def test_nothing_leaves_where_everything_fits():
    resident = planned(1.0, "none")
    assert planned(1.0, "auto").memory.offload == ()
    assert plan_json(planned(1.0, "auto")) == plan_json(resident)


@pytest.mark.parametrize("k", [0.3, 1.0, 3.0])
def test_auto_fits_and_is_never_slower_than_without_offload(k):
    limit = STATE + ONE_F_ONE_B / 2
    resident, found = planned(k, "none", limit), planned(k, "auto", limit)
    assert found.predicted.step_s <= resident.predicted.step_s
    assert max(found.predicted.peak_memory_bytes) <= limit
    validate(found)
    if k <= 1:
        assert found.memory.offload
        assert found.predicted.step_s < 0.95 * resident.predicted.step_s


def test_auto_is_not_slower_than_a_schedule_that_offloads_on_cuts_of_uneven_layers():
    layers = uniform_graph(12, 1.0)
    slower = [1 + i * 7 % 5 / 2 for i in range(len(layers.nodes))]
    nodes = [
        evolve(
            node, forward_s=by * node.forward_s, backward_input_s=by * node.backward_input_s,
            backward_weight_s=by * node.backward_weight_s,
        )
        for by, node in zip(slower, layers.nodes, strict=True)
    ]  # fmt: skip
    graph, families = evolve(layers, nodes=tuple(nodes)), tuple(map(find_family, ("1f1b", "po-h", "po-f")))
    options = SearchOptions(
        families=families[2:], recompute="none", anneal=False, memory_limit=(20 << 20) + 8 * SAVED, budget=80
    )
    named = plan(graph, cluster_with_hosts(DEVICES), MICROBATCHES, options)
    automatic = evolve(options, families=families, offload="auto", budget=3200)
    found = plan(graph, cluster_with_hosts(DEVICES), MICROBATCHES, automatic)
    assert found.predicted.step_s <= named.predicted.step_s * (1 + 1e-9)


@pytest.mark.parametrize("budget", [20, 300])
def test_a_step_is_not_longer_with_more_memory(budget):
    """Also where the search without offload spends the whole budget, so that orders with copies are not annealed."""
    limits = [STATE + passes * SAVED for passes in (5, 6.1, 8)]
    found = [planned(0.5, "auto", limit, budget=budget, oracle=simulated).predicted for limit in limits]
    steps = [each.step_s for each in found]
    assert all(more <= less * (1 + 1e-9) for less, more in itertools.pairwise(steps))
    assert all(max(each.peak_memory_bytes) <= limit for each, limit in zip(found, limits, strict=True))


def test_copies_are_added_until_what_only_the_oracle_counts_fits_too():
    """The limit is far above what the copies leave, but not by as much as messages take in addition."""
    cluster, graph = cluster_with_hosts(DEVICES), uniform_graph(8, 0.3)
    options = SearchOptions(
        families=(find_family("interleaved-1f1b"),), offload="auto", anneal=False, budget=50, min_chunks=2,
        max_chunks=2, oracle=simulated,
    )  # fmt: skip
    peak = max(plan(graph, cluster, MICROBATCHES, evolve(options, offload="none")).predicted.peak_memory_bytes)
    for part in (0.25, 0.5, 0.75, 0.99):
        limit = peak - SAVED - part * SAVED
        found = plan(graph, cluster, MICROBATCHES, evolve(options, memory_limit=limit)).predicted
        assert max(found.peak_memory_bytes) <= limit


@pytest.mark.parametrize("name", ["po-h", "po-f"])
def test_schedules_that_offload_do_so_when_they_are_named(name):
    found = planned(0.5, "none", families=(find_family(name),), anneal=False)
    assert found.schedule.startswith(name)
    stages = {each.stage for each in found.memory.offload}
    assert stages <= set(range(len(found.stages) // (2 if name == "po-h" else 1)))
    assert len(stages) >= len(found.stages) // 4


def test_shares_of_stages_leave():
    found = planned(0.5, {0: 1.0, 1: 0.5}, families=(find_family("1f1b"),), anneal=False)
    assert {each.stage: each.bytes for each in found.memory.offload} == {0: 2 * SAVED, 1: SAVED}


def test_stage_that_does_not_exist_is_refused():
    with pytest.raises(RequestError, match="offload names stage 99, and the plan has stages 0 to"):
        planned(0.5, {99: 1.0}, families=(find_family("1f1b"),), anneal=False, max_chunks=1)


def test_device_without_a_host_is_refused_where_everything_should_leave():
    cluster = cluster_with_hosts(DEVICES)
    alone = evolve(cluster, hubs=cluster.hubs[:1], links=tuple(link for link in cluster.links if "host" not in link.b))
    options = SearchOptions(families=RESIDENT, offload="all", budget=50)
    with pytest.raises(RequestError, match=r"device 0 \('gpu0'\) reaches no hub of kind host"):
        plan(uniform_graph(8, 1.0), alone, MICROBATCHES, options)
    automatic = evolve(options, offload="auto")
    assert plan(uniform_graph(8, 1.0), alone, MICROBATCHES, automatic).memory.offload == ()


def test_stages_recompute_or_offload():
    found = planned(0.5, "auto", STATE + ONE_F_ONE_B / 4, recompute=None)
    assert not {each.stage for each in found.memory.offload} & set(found.memory.recompute)


@pytest.mark.parametrize("layers_on_host", [0, 2, 5])
def test_auto_takes_no_more_of_a_host_than_it_has(layers_on_host):
    cluster = cluster_with_hosts(DEVICES, per_switch=2, host_bytes=layers_on_host * SAVED)
    limit = STATE + 0.6 * ONE_F_ONE_B
    options = SearchOptions(families=ALL, offload="auto", memory_limit=limit, budget=200)
    found = plan(uniform_graph(8, 0.5), cluster, MICROBATCHES, options)
    used = validate(found).host_bytes
    assert max(sum(used[:2]), sum(used[2:])) <= layers_on_host * SAVED
    assert max(found.predicted.peak_memory_bytes) <= limit


def test_host_with_too_little_memory_for_all_is_infeasible_with_what_would_fit():
    cluster = cluster_with_hosts(DEVICES, host_bytes=SAVED)
    options = SearchOptions(families=(find_family("1f1b"),), offload="all", anneal=False, budget=50)
    with pytest.raises(InfeasibleError, match=r"host 'host0' holds \d+ bytes .* give it \d+ bytes more, or keep stage"):
        plan(uniform_graph(8, 0.3), cluster, MICROBATCHES, options)


def test_neighbours_on_one_link_plan_copies_as_if_alone_or_for_a_full_link_whichever_is_faster():
    graph, cluster = uniform_graph(8, 0.5), cluster_with_hosts(DEVICES, per_switch=2)
    options = SearchOptions(families=(find_family("po-f"),), anneal=False, budget=50, oracle=simulated)
    found = plan(graph, cluster, MICROBATCHES, options)
    costs = found.predicted.costs
    storages = graph_storages(graph, [stage.nodes for stage in found.stages], costs)
    resident = evolve(found, memory=evolve(found.memory, offload=()), prediction=None)
    task = offloadable(resident, costs, cluster, storages)
    plans = [with_offload(resident, one, everything) for one in (task, task.slowed)]
    assert plans[0] != plans[1]
    assert found.predicted.step_s <= min(simulated(one, costs, cluster).step_s for one in plans) * (1 + 1e-9)
    assert found.predicted.step_s <= 1.01 * simulated(resident, costs, cluster).step_s
