"""The request that the options of ``panpipe plan`` make, files that are written, and options that are refused."""

import pytest
from attrs import evolve
from panpipe.answers.plan import planning as module
from panpipe.answers.plan.options import PlanOptions
from panpipe.answers.plan.planning import plan_request
from panpipe.core.cluster.cluster import cluster_json, fully_connected
from panpipe.core.costs.graph import OpGraph, OpNode, graph_json
from panpipe.core.errors import RequestError
from panpipe.core.plan.plan import plan_json, read_plan
from panpipe.core.search.suggestions.infeasible import NothingFits

from ...support.plans import hosted, predicted, scheduled


@pytest.fixture
def files(tmp_path):
    (tmp_path / "graph.json").write_text(
        graph_json(OpGraph((OpNode("a", 1, 1, 1, 0, 0, 0, 0, 0), OpNode("b", 2, 1, 1, 0, 0, 0, 0, 0)), ()))
    )
    cluster = hosted(fully_connected(2, 10**9, 1e9, 0.0), 1e9)
    (tmp_path / "cluster.json").write_text(cluster_json(cluster))
    return str(tmp_path / "cluster.json"), tmp_path / "graph.json"


def request(files, microbatches=4, tensor=1, **options):
    return plan_request(PlanOptions(cluster=files[0], graph=files[1], microbatches=microbatches, **options), tensor)


def test_request_of_a_graph(files):
    found, known = request(files, samples=5, seed=3, budget=50)
    assert (found.microbatches, found.seed, found.budget, found.anneal, found.boundaries) == (
        4,
        3,
        50,
        True,
        "operators",
    )
    assert len(found.machine.devices) == 2
    assert found.costs_of(4) is found.costs_of(4)
    assert found.costs_of(4).work.samples == 5
    assert list(found.families) == list(known)


def test_named_schedule_is_the_only_one(files):
    found, known = request(files, schedule="1f1b", layers=True)
    assert [family.name for family in found.families] == ["1f1b"]
    assert len(known) > 1
    assert (found.anneal, found.boundaries) == (False, "layers")


def test_offload_allows_schedules_that_offload(files):
    resident, offloads = (request(files, offload=wanted)[1] for wanted in ("none", "auto"))
    assert len(offloads) > len(resident)
    assert not any(family.offloads for family in resident)


def test_host_memory_limits_hosts_alone(files):
    machine = request(files, host_memory=1000.0)[0].machine
    assert [hub.memory_bytes for hub in machine.hubs if hub.kind == "host"] == [1000]


REFUSED = {
    "microbatches": ({"microbatches": 0}, "--microbatches is 0: give a whole number of at least 1"),
    "budget": ({"budget": 0}, "--budget is 0: give a whole number"),
    "no microbatches": ({"microbatches": None}, "--microbatches is missing: give the number of microbatches"),
    "host memory": ({"host_memory": -1.0}, "--host-memory is -1.*give bytes, at least 0"),
    "infinite": ({"host_memory": float("inf")}, "--host-memory is inf"),
    "layers": ({"layers": True, "offload": "auto"}, "--layers does not plan offload"),
    "tensor": ({"tensor": 2, "offload": "auto"}, "--offload is given with --tp: copies of tensor ranks"),
    "shard": ({"shard": "x"}, "x"),
    "schedule": ({"schedule": "nothing"}, "nothing"),
}


@pytest.mark.parametrize(("options", "reason"), REFUSED.values(), ids=REFUSED)
def test_wrong_options_are_refused(files, options, reason):
    with pytest.raises(RequestError, match=reason):
        request(files, **options)


def test_one_of_graph_and_model_is_needed(files):
    found, _ = plan_request(PlanOptions(cluster=files[0], microbatches=4))
    with pytest.raises(RequestError, match="give one of --graph FILE and --model module:factory"):
        found.costs_of(4)
    both, _ = request(files, model="mlp")
    with pytest.raises(RequestError, match="give one of --graph FILE"):
        both.costs_of(4)


def test_evaluations_of_a_search_in_which_nothing_fits_count(files, monkeypatch):
    closest, budgets = predicted(scheduled("1f1b", 2, 4)), []
    closest = evolve(closest, prediction=evolve(closest.predicted, evaluations=30))

    class Unfit:
        def prepare(self):
            pass

        def search(self, **_):
            raise NothingFits("nothing fits", closest, [1.0, 1.0])

    def request_of(options, tensor):
        budgets.append(options.budget)
        return Unfit(), ()

    monkeypatch.setattr(module, "plan_request", request_of)
    monkeypatch.setattr(module, "wanted_tensor", lambda *_: [1, 2])
    monkeypatch.setattr(module, "refuse", refuse)
    options = PlanOptions(cluster=files[0], graph=files[1], microbatches=4, mesh="pp=2", budget=100)
    with pytest.raises(NothingFits):
        module.run(options, tp="auto", seconds=None, top=None, out=None, json=False)
    assert budgets == [50, 70]


def refuse(nothing, request, *, json):
    raise nothing


def test_plans_are_written_with_numbers(tmp_path):
    plans = [predicted(scheduled(name, 2, 4)) for name in ("1f1b", "gpipe")]
    paths = module._write(tmp_path / "plan.json", plans)
    assert [path.name for path in paths] == ["plan.json", "plan.2.json"]
    assert [path.read_text() for path in paths] == [plan_json(plan) for plan in plans]
    second = [" ".join(map(str, read_plan(path).device_actions[1])) for path in paths]
    assert second == ["1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3", "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3"]
