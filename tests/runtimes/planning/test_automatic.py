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
from panpipe.core.errors import RequestError
from panpipe.core.search.suggestions.preference import family_of
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.planning import automatic as module
from panpipe.runtimes.planning.automatic import Planning
from torch import nn

from ...support.plans import options_of

MICROBATCHES = 4
ROOM = fully_connected(2, 10**12, 1e12, 0.0)


def chain(count, seconds=1.0, saved=0):
    nodes = tuple(OpNode(f"{i}", seconds, seconds, seconds, saved_bytes=saved) for i in range(count))
    return OpGraph(nodes, tuple(OpEdge(a.name, b.name, 1) for a, b in pairwise(nodes)))


class Measured:
    """Measurements of a chain of operators: a program saves what its operators do, times a factor."""

    def __init__(self, graph, team, factor=1.0):
        self._graph, self.team, self._factor = graph, team, factor
        self.where = dict.fromkeys(range(2), torch.device("cpu"))
        self.sizes, self.replicas, self.storages = {}, None, {}
        self.costs = {}

    def message(self, cluster):
        return FREE

    @property
    def measured(self):
        return self._graph

    def graph(self):
        return self._graph

    def costs_of(self, stages, derive=False):
        nodes = self._graph.nodes
        sums = [sum(nodes[self._graph.index[name]].forward_s for name in stage) for stage in stages]
        saved = [sum(nodes[self._graph.index[name]].saved_bytes for name in stage) for stage in stages]
        found = tuple(StageCosts(s, s, s, saved_bytes=b) for s, b in zip(sums, saved, strict=True))
        self.costs[stages] = self.derived_costs(found, stages, ()) if derive else found
        return self.costs[stages]

    def derived_costs(self, costs, stages, place):
        return tuple(evolve(cost, saved_bytes=self._factor * cost.saved_bytes) for cost in costs)


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
            options_of(**options),
            report=lambda phase, done=0, total=0: lines.append(phase),
        )  # fmt: skip
        return found, lines

    yield request
    for team in teams:
        team.close()


def test_more_stages_are_tried_up_to_max_chunks_and_the_number_of_operators(planning):
    request, lines = planning(chain(8), schedule="interleaved-1f1b", max_chunks=4)
    assert {len(plan.stages) for plan in request.candidates()} <= {2, 4, 6, 8}
    assert [line for line in lines if "cutting" in line] == [f"cutting into {count} stages" for count in (2, 4, 6, 8)]
    few, lines = planning(chain(5), schedule="interleaved-1f1b", max_chunks=4)
    few.candidates()
    assert not any("6 stages" in line or "8 stages" in line for line in lines)


def test_schedules_that_are_predicted_alike_are_compared(planning):
    """Of schedules with as many stages and predictions within 5 %, two are candidates, and 1F1B always."""
    request, _ = planning(chain(8), schedule="auto", max_chunks=2)
    found = request.candidates()
    assert "1f1b" in {family_of(plan) for plan in found}
    folded = [plan for plan in found if len(plan.stages) == 4]
    assert len({family_of(plan) for plan in folded}) == len(folded) == 2


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
        request.candidates()
    assert lines == []


def test_fewer_operators_than_devices_are_refused(planning, monkeypatch):
    def refuse(*asked):
        raise RequestError(f"asked for {asked[1:]}")

    monkeypatch.setattr(module, "refuse_too_few", refuse)
    request, lines = planning(chain(1))
    with pytest.raises(RequestError, match=r"asked for \(2, 2\)"):
        request.candidates()
    assert lines == []


def test_devices_measure_a_loss_that_stays_python_at_the_same_time():
    """Each copies the model for it, with many parameters."""
    model, batch = nn.Sequential(*(nn.Linear(4, 4) for _ in range(100))), torch.randn(8, 4)

    def step(model, batch):
        out = model(batch)
        return out.square().mean() if out.sum() > -1e9 else out.mean()

    pipe = panpipe.pipeline(
        model,
        step,
        batch,
        optimizer=torch.optim.SGD,
        microbatches=4,
        plan=panpipe.Auto(cache=False),
        run=panpipe.Run(progress=False),
    )
    assert pipe.step(batch).isfinite()
