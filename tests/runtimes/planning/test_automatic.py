"""Automatic planning with given measurements: how many stages are tried, which plans are kept, and what is refused."""

from itertools import pairwise
from types import SimpleNamespace

import panpipe
import pytest
import torch
from attrs import evolve
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.costs import StageCosts
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.costs.message_overhead import FREE
from panpipe.core.errors import InfeasibleError, RequestError
from panpipe.core.search.problem.oracle import longest_path
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.planning import automatic as module
from panpipe.runtimes.planning.automatic import Planning, step_s
from panpipe.runtimes.planning.options import PlanningOptions
from torch import nn

MICROBATCHES = 4
ROOM = fully_connected(2, 10**12, 1e12, 0.0)


def chain(count, seconds=1.0, saved=0):
    nodes = tuple(OpNode(f"{i}", seconds, seconds, seconds, saved_bytes=saved) for i in range(count))
    return OpGraph(nodes, tuple(OpEdge(a.name, b.name, 1) for a, b in pairwise(nodes)))


class Measured:
    """Measurements of a chain of operators: a stage takes the sum of its operators, times a factor."""

    def __init__(self, graph, team, factor=1.0):
        self._graph, self.team, self._factor = graph, team, factor
        self.where = dict.fromkeys(range(2), torch.device("cpu"))
        self.sizes, self.replicas, self.message, self.storages = {}, None, FREE, {}
        self.stage_costs = {}

    def graph(self):
        return self._graph

    def costs_of(self, stages):
        nodes = self._graph.nodes
        sums = [self._factor * sum(nodes[self._graph.index[name]].forward_s for name in stage) for stage in stages]
        saved = [sum(nodes[self._graph.index[name]].saved_bytes for name in stage) for stage in stages]
        pairs = zip(sums, saved, strict=True)
        self.stage_costs[stages] = tuple(StageCosts(s, s, s, saved_bytes=b) for s, b in pairs)
        return self.stage_costs[stages]


@pytest.fixture
def planning(monkeypatch):
    teams = []

    def request(graph, factor=1.0, **options):
        team = ThreadTeam(2)
        teams.append(team)
        lines = []
        monkeypatch.setattr(module, "Measurements", lambda *_: Measured(graph, team, factor))
        options = {"cluster": ROOM, "schedule": "1f1b", **options}
        operators = SimpleNamespace(graph=graph, step=SimpleNamespace(), members={}, nodes={})
        found = Planning(
            SimpleNamespace(operators=operators), MICROBATCHES, team,
            PlanningOptions(oracle=longest_path, cut_oracle=longest_path, **options),
            report=lambda phase, done=0, total=0: lines.append(phase),
        )  # fmt: skip
        return found, lines

    yield request
    for team in teams:
        team.close()


def test_measured_stages_are_planned_with_their_own_times(planning):
    request, lines = planning(chain(8), factor=2.0, max_chunks=1)
    (plan,) = request.plans()
    assert [len(stage.nodes) for stage in plan.stages] == [4, 4]
    assert [cost.forward_s for cost in plan.predicted.costs] == [8.0, 8.0]  # measured: twice the operators' sum
    assert plan.mesh == request.team.mesh
    assert step_s(plan) == pytest.approx((MICROBATCHES + 1) * 8.0 * 3)
    assert lines == [
        "measuring links", "measuring operators", "cutting into 2 stages", "deriving 2 stages",
        "choosing a schedule of 2 stages",
    ]  # fmt: skip


def test_more_stages_are_tried_up_to_max_chunks_and_the_number_of_operators(planning):
    request, lines = planning(chain(8), schedule="interleaved-1f1b", max_chunks=4)
    assert {len(plan.stages) for plan in request.plans()} <= {2, 4, 6, 8}
    assert list(dict.fromkeys(line for line in lines if "deriving" in line)) == [
        f"deriving {count} stages" for count in (2, 4, 6, 8)
    ]
    few, lines = planning(chain(5), schedule="interleaved-1f1b", max_chunks=4)
    few.plans()
    assert not any("6 stages" in line or "8 stages" in line for line in lines)


def test_no_plan_that_fits_is_infeasible(planning):
    request, _ = planning(chain(8, saved=100), cluster=fully_connected(2, 10, 1e12, 0.0), max_chunks=1)
    with pytest.raises(InfeasibleError, match=r"device 0 .* needs 400 bytes and may hold 10"):
        request.plans()


def test_no_schedule_for_the_numbers_is_refused(planning):
    request, _ = planning(chain(8), schedule="v-half", max_chunks=1)  # it has two stages a device
    with pytest.raises(RequestError, match=r"schedules? supports 2 devices and 4 microbatches"):
        request.plans()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"recompute": [7]}, r"recompute names stage 7, and the plan has stages 0 to 3"),
        ({"offload": {9: 0.5}}, "9"),
        ({"cluster": fully_connected(1, 1, 1.0, 0.0)}, "the cluster has 1"),
    ],
)
def test_request_is_refused_before_anything_is_measured(planning, options, said):
    request, lines = planning(chain(8), **options)
    with pytest.raises(RequestError, match=said):
        request.plans()
    assert lines == []


def test_fewer_operators_than_devices_are_refused(planning, monkeypatch):
    def refuse(*asked):
        raise RequestError(f"asked for {asked[1:]}")

    monkeypatch.setattr(module, "refuse_too_few", refuse)
    request, lines = planning(chain(1))
    with pytest.raises(RequestError, match=r"asked for \(2, 2\)"):
        request.plans()
    assert lines == []


def test_plain_is_1f1b_of_the_fastest_plan_with_the_fewest_stages(planning):
    request, _ = planning(chain(8), schedule="auto", max_chunks=1)
    plans = request.plans()
    (plain,) = request.plain(plans)
    assert plain.schedule == "auto(1f1b)"
    assert [stage.nodes for stage in plain.stages] == [stage.nodes for stage in plans[0].stages]
    assert plain.mesh == request.team.mesh


def test_plain_is_empty_if_1f1b_is_no_option_or_does_not_fit(planning, monkeypatch):
    request, _ = planning(chain(8), schedule="gpipe", max_chunks=1)
    assert request.plain(request.plans()) == []
    request, _ = planning(chain(8), schedule="1f1b", max_chunks=1)
    plans = request.plans()
    without = [evolve(plan, prediction=evolve(plan.prediction)) for plan in plans]

    def refuses(*_, **__):
        raise InfeasibleError("nothing fits")

    monkeypatch.setattr(module, "choose_schedules", refuses)
    assert request.plain(without) == []


def test_devices_measure_a_loss_that_stays_python_at_the_same_time():
    """Each copies the model for it, with many parameters."""
    model, batch = nn.Sequential(*(nn.Linear(4, 4) for _ in range(100))), torch.randn(8, 4)

    def step(model, batch):
        out = model(batch)
        return out.square().mean() if out.sum() > -1e9 else out.mean()

    pipe = panpipe.pipeline(
        model, step, batch, optimizer=torch.optim.SGD, microbatches=4, plan_cache=False, progress=False
    )
    assert pipe.step(batch).isfinite()
