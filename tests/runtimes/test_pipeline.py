"""The public class: its properties, its methods with one process, and how it ends."""

import contextlib
import copy
import re
import sys
import threading
from pathlib import Path

import panpipe
import pytest
import torch
from panpipe.core.errors import RequestError
from torch import nn

from ..support.training import case_of, pipeline_of

SGD = torch.optim.SGD
WIDTH, ROWS = 8, 4


def step(model, batch):
    loss = model(batch).pow(2).mean()
    return loss, {"halved": loss.detach() / 2}


CASE = case_of(
    lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), step,
    lambda rows, dtype: torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows), dtype=dtype),
)  # fmt: skip
BATCH = CASE.batch(ROWS, torch.float32)


@pytest.fixture
def made():
    pipe, alone = pipeline_of(CASE, ROWS, 2, optimizer=lambda named: SGD(named, lr=0.5))
    yield pipe, alone
    pipe.close()


@pytest.fixture
def pipe(made):
    return made[0]


def test_gradients_wait_without_an_update(pipe):
    before = copy.deepcopy(pipe._session.model)
    pipe.step(BATCH, update=False)
    assert (pipe.metrics.steps, pipe.metrics.updates) == (1, 0)
    assert all(map(torch.equal, pipe._session.model.parameters(), before.parameters()))
    with pytest.raises(RequestError, match="gradients"):
        pipe.state_dict()
    pipe.step(BATCH)
    assert (pipe.metrics.steps, pipe.metrics.updates) == (2, 1)


def test_model_parts_and_optimizers_of_this_process(pipe):
    assert {name for own in pipe._session.stage_parameters.values() for name in own} == dict(
        pipe._session.model.named_parameters()
    ).keys()
    assert set(pipe._session.programs) == {0, 1}
    assert pipe.metrics.learning_rates == [0.5]
    assert not pipe._trainer.optimizers_lent
    assert all(isinstance(optimizer, SGD) for optimizer in pipe.optimizers.values())
    assert pipe._trainer.optimizers_lent  # their replacement would not be seen


def test_average_and_visits_follow_the_parameters(pipe):
    average = panpipe.weights.ema(pipe, 0.5)
    first = pipe._session.model[0].weight.detach().clone()
    pipe.step(BATCH)
    torch.testing.assert_close(average.tensors["0.weight"], (first + pipe._session.model[0].weight.detach()) / 2)
    found = panpipe.weights.on_parameters(pipe, lambda name, parameter: parameter.fill_(1.0).sum().item())
    assert found == {"0.weight": 64.0, "0.bias": 8.0, "2.weight": 64.0, "2.bias": 8.0}
    assert pipe._session.model[2].bias.tolist() == [1.0] * WIDTH


def test_metrics_are_those_of_their_moment(pipe):
    pipe.step(BATCH)
    metrics = pipe.metrics
    before = dict(metrics)
    pipe.step(BATCH)
    assert (metrics.steps, pipe.metrics.steps, dict(metrics)) == (1, 2, before)
    assert repr(metrics).startswith("<steps=1, updates=1, skipped=False, learning_rates=[0.5], halved=")
    with pytest.raises(AttributeError):
        metrics.steps = 7


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("steps", r"it is pipe\.metrics\.steps now"), ("ema", r"panpipe\.weights\.ema\(pipe, \.\.\.\)"),
        ("trace_evaluation", r"pipe\.trace_step\(batch, evaluate=True\)"), ("model", "the one that you gave"),
    ],
)  # fmt: skip
def test_earlier_names_say_what_replaces_them(pipe, name, fix):
    with pytest.raises(AttributeError, match=fix):
        getattr(pipe, name)
    with pytest.raises(AttributeError):
        setattr(pipe, name, 1)


def test_public_names():
    assert len([name for name in dir(panpipe.Pipeline) if not name.startswith("_")]) == 15


def test_checkpoint_that_could_not_be_written_is_raised_by_the_next_step_once(pipe, tmp_path, monkeypatch):
    pipe.step(BATCH)
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError):
        pipe.checkpoint(tmp_path / "file" / "step-1")
    pipe.checkpoint(tmp_path / "step-1")
    pipe.step(BATCH)
    pipe.resume(tmp_path / "step-1")
    assert pipe.metrics.steps == 1


def test_pipeline_that_was_built_by_hand_is_not_planned_again(pipe):
    with pytest.raises(RequestError, match=r"cannot be planned again: build it with panpipe\.pipeline on real devices"):
        pipe.replan()


def test_text_has_the_stages_the_steps_and_the_end(pipe):
    pipe.step(BATCH)
    assert repr(pipe).startswith("<Pipeline 1 step trained; stages here: 0, 1, on cpu\n")
    pipe.close()
    assert repr(pipe).startswith("<Pipeline closed; ")


@pytest.mark.parametrize(
    ("failure", "told"), [(None, 0), (RequestError("no"), 0), (SystemExit(0), 0), (KeyError(1), 1)]
)
def test_context_closes_and_reports_a_failure_of_this_process(pipe, monkeypatch, failure, told):
    reported = []
    monkeypatch.setattr(pipe._trainer.team, "fail", reported.append)
    with contextlib.nullcontext() if failure is None else pytest.raises(type(failure)), pipe as entered:
        assert entered is pipe
        if failure is not None:
            raise failure
    assert reported == [failure] * told
    with pytest.raises(RequestError, match="the pipeline is closed"):
        pipe.step(BATCH)


def test_a_step_enters_the_files_that_the_documentation_lists():
    root = Path(__file__).parents[2]
    text = (root / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    section = text.split("## A step, file by file")[1].split("\n## ")[0]
    listed = re.findall(r"^\d+\. `(.*?)`", section, re.MULTILINE)
    entered, during = set[str](), threading.Event()

    def note(frame, event, _):
        if event == "call" and during.is_set():
            entered.add(frame.f_code.co_filename)

    threading.setprofile(note)  # of the threads of the devices, which the first step creates
    try:
        pipe, _ = pipeline_of(CASE, ROWS, 2, optimizer=SGD, clip_norm=1.0)
        pipe.step(BATCH)
        during.set()
        sys.setprofile(note)
        pipe.step(BATCH)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        pipe.close()
    assert [name for name in listed if str(root / name) not in entered] == []
