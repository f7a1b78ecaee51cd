"""The public class: its properties, its methods with one process, and how it ends."""

import contextlib
import importlib.metadata
import os
import re
import sys
import threading
from pathlib import Path

import panpipe
import pytest
import torch
from panpipe.core.errors import RequestError
from torch import nn

from ..support.plans import predicted
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


def test_model_parts_and_optimizers_of_this_process(pipe):
    assert {name for own in pipe._session.stage_parameters.values() for name in own} == dict(
        pipe._session.model.named_parameters()
    ).keys()
    assert set(pipe._session.programs) == {0, 1}
    assert pipe.metrics.learning_rates == [0.5]
    assert not pipe._trainer.optimizers_lent
    assert all(isinstance(optimizer, SGD) for optimizer in pipe.optimizers.values())
    assert pipe._trainer.optimizers_lent  # their replacement would not be seen


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


def test_pipeline_that_was_built_by_hand_is_not_planned_again(pipe):
    with pytest.raises(RequestError, match=r"cannot be planned again: build it with panpipe\.pipeline on real devices"):
        pipe.replan()


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


def test_closed_pipeline_refuses_every_operation(pipe, tmp_path):
    pipe.step(BATCH)
    pipe.close()
    pipe.close()
    for asked in (
        lambda: pipe.step(BATCH),
        lambda: pipe.trace_step(BATCH),
        lambda: pipe.evaluate(BATCH),
        lambda: pipe.trace_step(BATCH, evaluate=True),
        lambda: pipe.forward(BATCH, lambda model, given: model(given)),
        lambda: pipe.save(tmp_path),
        lambda: pipe.checkpoint(tmp_path / "1"),
        lambda: pipe.resume(tmp_path / "1"),
        pipe.__enter__,
    ):
        with pytest.raises(panpipe.RequestError, match=r"the pipeline is closed: .*build another"):
            asked()
    assert "closed" in repr(pipe)


def test_repr_of_pipeline_and_plan_is_short(pipe):
    text = repr(predicted(pipe.plan))
    assert text.startswith("<Plan of Sequential: 1f1b, 2 stages on 2 devices, 2 microbatches; predicted: ")
    assert text.endswith(" MiB on the fullest device>")
    pipe.step(BATCH)
    first, second = repr(pipe).splitlines()
    assert first == "<Pipeline 1 step trained; stages here: 0, 1, on cpu"
    assert "<Plan of Sequential: 1f1b, 2 stages on 2 devices" in second


def test_package_has_a_version():
    assert panpipe.__version__ == importlib.metadata.version("panpipe")
    assert "__version__" in dir(panpipe)


def test_pipeline_is_refused_in_a_fork(pipe):
    pipe.step(BATCH)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            pipe.step(BATCH)
        except panpipe.RequestError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with open(read, encoding="utf-8") as said:
        assert f"this process is a fork of process {os.getpid()}, whose pipeline it is" in said.read()
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
