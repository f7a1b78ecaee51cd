"""The choices that are left to the search: meshes, recomputation, replicas, and the work of one replica."""

from types import SimpleNamespace

import pytest
from panpipe.answers.plan.choices import (
    judge_of,
    of_one_replica,
    oracle_of,
    replicas_allowed,
    wanted_meshes,
    wanted_recompute,
)
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.errors import RequestError
from panpipe.core.search import longest_path
from panpipe.core.trace.throughput import StepTotals

from ...support.plans import orders, plan_of

FOUR = fully_connected(4, 10**9, 1.0, 0.0)


@pytest.mark.parametrize(
    ("mesh", "analytic_costs", "meshes"),
    [
        (None, False, {(4, 1)}), (None, True, {(4, 1), (2, 2), (1, 4)}), ("auto", False, {(4, 1), (2, 2), (1, 4)}),
        ("pp=2,dp=2", False, {(2, 2)}), ("pp=4", True, {(4, 1)}), ("dp=4", True, {(1, 4)}),
    ],
)  # fmt: skip
def test_meshes_use_all_devices(mesh, analytic_costs, meshes):
    assert set(wanted_meshes(mesh, FOUR, analytic_costs=analytic_costs)) == meshes


@pytest.mark.parametrize("mesh", ["pp=3", "pp=2,dp=4", "rings=2"])
def test_mesh_of_another_number_of_devices_is_refused(mesh):
    with pytest.raises(RequestError):
        wanted_meshes(mesh, FOUR, analytic_costs=True)


@pytest.mark.parametrize(
    ("given", "analytic_costs", "wanted"),
    [(None, False, "none"), (None, True, None), ("auto", False, None), ("all", True, "all"), ("none", True, "none")],
)
def test_recomputation_is_searched_with_analytic_costs(given, analytic_costs, wanted):
    assert wanted_recompute(given, analytic_costs=analytic_costs) == wanted


@pytest.mark.parametrize("given", ["attention", "every:2"])
def test_recomputed_attention_or_layer_is_no_stage_that_recomputes(given):
    assert wanted_recompute(given, analytic_costs=True) == "none"
    with pytest.raises(RequestError, match="is for a model on a described cluster"):
        wanted_recompute(given, analytic_costs=False)


def test_other_recomputation_is_refused():
    with pytest.raises(RequestError, match="--recompute is 'some': give none, all, auto, attention, or every:N"):
        wanted_recompute("some", analytic_costs=True)


@pytest.mark.parametrize(
    ("graph", "cluster", "allowed"),
    [(False, "8xA100-40GB", True), (True, "8xA100-40GB", False), (False, "cpu:2", False)],
)
def test_replicas_are_for_models_on_described_devices(graph, cluster, allowed):
    assert replicas_allowed(graph, cluster) is allowed


def test_work_of_one_replica_is_its_share():
    plan = plan_of(orders("0F0 0B0", "1F0 1B0"), (0, 1), data=2)
    costs = SimpleNamespace(work=StepTotals(9, 100, 8.0), peak_flops_per_s=[1.0, 2.0, 3.0, 4.0])
    assert of_one_replica(costs, plan) == (StepTotals(4, 50, 4.0), [1.0, 2.0])
    costs = SimpleNamespace(work=StepTotals(9, None, None), peak_flops_per_s=None)
    assert of_one_replica(costs, plan) == (StepTotals(4, None, None), None)


def test_files_are_predicted_by_their_contract_and_models_by_the_simulator():
    assert oracle_of(True) is longest_path
    assert oracle_of(False) is judge_of(True) is not longest_path
    assert judge_of(False) is None
