"""``panpipe explore``: with which question the page starts, from files, a model and a cluster."""

import sys

import pytest

pytest.importorskip("starlette", reason="needs panpipe[explore]")

from panpipe.answers.bundled_models import BUNDLED
from panpipe.cli.explore import explore
from panpipe.core.costs.graph import OpGraph, OpNode, graph_json
from panpipe.core.errors import RequestError
from panpipe.core.plan.plan import plan_json
from panpipe.explore import app
from panpipe.explore.question import FileQuestion, PlanQuestion

from ..support.plans import predicted, scheduled


@pytest.fixture
def started(monkeypatch):
    """The arguments of the explorer, and of its server."""
    found = []
    monkeypatch.setattr(app, "Explorer", lambda *given: found.append(given) or "explorer")
    monkeypatch.setattr(app, "serve", lambda explorer, port, browser: found.append((explorer, port, browser)))
    return found


def start_of(started, files=None, **options):
    explore(files, **{"model": None, "cluster": None, "port": 0, "browser": True, **options})
    return started[0][0]


def test_explore_starts_with_the_given_model_and_cluster(started):
    name = next(iter(BUNDLED))
    found = start_of(started, model=name, cluster="4xA100-40GB")
    assert isinstance(found, PlanQuestion)
    assert (found.model, found.cluster, found.graph) == (name, "4xA100-40GB", None)
    assert started[0][2] is None  # no factory


def test_factory_of_the_user_may_be_called(started):
    start_of(started, model="math:sqrt")
    assert started[0][2] == "math:sqrt"


def test_graph_and_result_files(started, tmp_path):
    (tmp_path / "graph.json").write_text(graph_json(OpGraph((OpNode("a", 1, 1, 1, 0, 0, 0, 0, 0),), ())))
    found = start_of(started, [tmp_path / "graph.json"])
    assert (found.model, found.graph) == (None, str(tmp_path / "graph.json"))
    (tmp_path / "plan.json").write_text(plan_json(predicted(scheduled("1f1b", 2, 4))))
    started.clear()
    assert isinstance(start_of(started, [tmp_path / "plan.json"]), FileQuestion)


def test_wrong_model_or_cluster_is_refused(started):
    for wrong in ({"model": "not-a-model"}, {"cluster": "not-a-cluster"}):
        with pytest.raises(RequestError, match="not-a-"):
            start_of(started, **wrong)
    assert started == []


def test_packages_that_are_missing_are_named(started, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(RequestError, match=r"panpipe explore needs uvicorn: pip install 'panpipe\[explore\]'"):
        start_of(started)
