"""Plans in the explorer: from an operator-graph file, with the same answer as the command line."""

import itertools
import json
import os
from types import SimpleNamespace

import pytest
from panpipe.cli import main
from panpipe.core.errors import InfeasibleError, RequestError
from panpipe.explore import plan_answers
from panpipe.explore.question import PlanQuestion

from ..support.browser import in_a_browser
from .conftest import explorer
from .test_browser import shows

NODE = {
    "backward_input_s": 0.01, "backward_weight_s": 0.01, "optimizer_s": 0.001, "parameter_bytes": 10**8,
    "state_bytes": 8 * 10**8, "saved_bytes": 2 * 10**8, "workspace_bytes": 5 * 10**7,
}  # fmt: skip


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """A chain of sixteen operators."""
    names = [f"model.h.{i // 2}.{'mlp' if i % 2 else 'attn'}/op" for i in range(16)]
    nodes = [{"name": name, "forward_s": 0.01 + 0.001 * (i % 3), **NODE} for i, name in enumerate(names)]
    edges = [{"src": src, "dst": dst, "bytes": 10**7} for src, dst in itertools.pairwise(names)]
    path = tmp_path_factory.mktemp("graph") / "graph.json"
    path.write_text(json.dumps({"format": "panpipe.opgraph/1", "nodes": nodes, "edges": edges}), encoding="utf-8")
    return path


def reported(job, question):
    found = []
    job(question, lambda **line: found.append(line))
    return found


@pytest.mark.parametrize("name", ["graph", "cluster"])
def test_file_that_has_changed_is_planned_for_again(tmp_path, monkeypatch, name):
    searched = []
    request = SimpleNamespace(search=lambda progress: searched.append(1) or SimpleNamespace(plans=()))
    monkeypatch.setattr(plan_answers, "_request", lambda question: (request, ()))
    monkeypatch.setattr(plan_answers, "_found", {})
    file = tmp_path / "file.json"
    file.write_text("{}", encoding="utf-8")
    question = PlanQuestion(**{name: str(file)})
    for _ in range(2):
        plan_answers.search(question, lambda **line: None)
    assert len(searched) == 1
    os.utime(file, ns=(1, 1))
    plan_answers.search(question, lambda **line: None)
    assert len(searched) == 2


@pytest.mark.slow
def test_plan_is_that_of_its_command_line(graph, capsys):
    question = PlanQuestion(graph=str(graph), cluster="4xA100-40GB", microbatches=8, budget=1500)
    *before, last = reported(plan_answers.report_answer, question)
    assert any("best step" in line["progress"]["text"] for line in before)
    words = last["answer"]["command"].split()
    assert main([*words[1:], "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    for name in ("predicted_step_s", "schedule", "device_actions", "stages", "peak_memory_bytes", "idle"):
        assert last["answer"]["figures"][name] == printed[name], name
    names = last["answer"]["report"]["plan"]["stages"][0]["names"]
    assert "model.h.0.attn" in names


@pytest.mark.slow
def test_plan_that_does_not_fit_says_what_would(graph):
    question = PlanQuestion(graph=str(graph), cluster="2xA100-40GB", microbatches=4, budget=500, memory_limit=5e9)
    with pytest.raises(InfeasibleError, match="smallest change that fits"):
        plan_answers.report_answer(question, lambda **line: None)
    fits = PlanQuestion(graph=str(graph), cluster="2xA100-40GB", microbatches=4, budget=500, rank=99)
    with pytest.raises(RequestError, match="and no plan 99"):
        plan_answers.report_answer(fits, lambda **line: None)


@pytest.mark.slow
@in_a_browser
def test_graph_is_planned_in_the_page_and_a_module_is_found(page, graph):
    with explorer(graph, "--cluster", "4xA100-40GB") as address:
        page.goto(address)
        shows(page, "graph|Pipeline plan")
        page.locator("#search").fill("h.3.attn")
        assert page.locator("#search-count").text_content() == "1 stage"
        assert page.locator(".stage:not(.dim)").count() == 1
        assert page.locator("#topology img").count() == 1
        assert page.locator("#command").text_content().startswith("panpipe plan --graph ")
        page.goto("about:blank")  # before the server ends: the page may still read points


@pytest.mark.slow
@in_a_browser
def test_back_and_forward_show_earlier_answers_on_models_without_a_search(page, graph):
    with explorer(graph) as address:
        page.goto(address)
        shows(page, "The graph|Pipeline plan")
        command = page.locator("#command")
        page.get_by_text("--microbatches 8").wait_for()
        page.locator("input[name=microbatches-number]").fill("6")
        page.locator("input[name=microbatches-number]").blur()
        page.get_by_role("button", name="Search a plan").click()
        page.get_by_text("--microbatches 6").wait_for()
        page.get_by_text("uniform stages", exact=True).click()
        shows(page, "^1f1b$")
        for turn, number in ((page.go_back, 6), (page.go_back, 8), (page.go_forward, 6)):
            turn()
            page.get_by_text(f"--microbatches {number}").wait_for()
            assert "panpipe plan" in command.text_content()
            assert page.locator("input[name=microbatches-number]").input_value() == str(number)
            assert page.locator("h1").count() == 1
            assert not page.locator("#progress").is_visible()
        page.go_forward()
        shows(page, "^1f1b$")
        page.goto("about:blank")  # before the server ends
