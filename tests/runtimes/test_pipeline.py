"""The public class: its properties, its methods with one process, and how it ends."""

import contextlib
import copy
import itertools

import panpipe
import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.core.trace.trace import Trace
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


def test_step_returns_the_loss_and_keeps_the_metrics(made):
    pipe, alone = made
    wanted = step(alone, BATCH)[0]
    loss = pipe.step(BATCH)
    assert loss.item() == pytest.approx(wanted.item())
    assert pipe.metrics == {"halved": pytest.approx(wanted.item() / 2)}
    metrics = pipe.metrics
    assert (metrics.steps, metrics.updates, metrics.skipped, metrics.grad_norm) == (1, 1, False, None)
    wanted.backward()
    for mine, theirs in zip(pipe._session.model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach() - 0.5 * theirs.grad)


def test_gradients_wait_without_an_update(pipe):
    before = copy.deepcopy(pipe._session.model)
    pipe.step(BATCH, update=False)
    assert (pipe.metrics.steps, pipe.metrics.updates) == (1, 0)
    assert all(map(torch.equal, pipe._session.model.parameters(), before.parameters()))
    with pytest.raises(RequestError, match="gradients"):
        pipe.state_dict()
    pipe.step(BATCH)
    assert (pipe.metrics.steps, pipe.metrics.updates) == (2, 1)


def test_norm_is_that_of_the_last_clipped_update():
    pipe, alone = pipeline_of(CASE, ROWS, 2, optimizer=lambda named: SGD(named, lr=0.5), clip_norm=1e-3)
    pipe.step(BATCH)
    step(alone, BATCH)[0].backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in alone.parameters()])
    assert pipe.metrics.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    pipe.close()


def test_evaluation_and_functions_change_nothing(made):
    pipe, alone = made
    assert pipe.evaluate(BATCH).item() == pytest.approx(step(alone, BATCH)[0].item())
    other = pipe.evaluate(BATCH, step=lambda model, batch: 3 * step(model, batch)[0])
    assert other.item() == pytest.approx(3 * step(alone, BATCH)[0].item())
    torch.testing.assert_close(pipe.forward(BATCH, lambda model, batch: model(batch)), alone(BATCH).detach())
    with pytest.raises(RequestError, match="function is 3: give a function of model and batch that returns tensors"):
        pipe.forward(BATCH, 3)
    assert (pipe.metrics.steps, pipe.metrics.updates) == (0, 0)


def test_traced_step_has_every_action(pipe):
    assert pipe._session.trainer.state.trace is None
    _, trace = pipe.trace_step(BATCH)
    assert isinstance(trace, Trace)
    assert pipe._session.trainer.state.trace is trace
    assert {f"{s}{k}{m}" for s, k, m in itertools.product(range(2), "FB", range(2))} <= {
        str(event.action) for event in trace.events
    }
    _, evaluated = pipe.trace_step(BATCH, evaluate=True)
    assert not any(event.action.kind == "B" for event in evaluated.events)


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


def test_state_is_restored_with_the_counts(pipe):
    pipe.step(BATCH)
    state = copy.deepcopy(pipe.state_dict())
    pipe.step(BATCH)
    later = copy.deepcopy(pipe._session.model)
    pipe.load_state_dict(state)
    assert (pipe.metrics.steps, pipe.metrics.updates) == (1, 1)
    pipe.step(BATCH)
    assert all(map(torch.equal, pipe._session.model.parameters(), later.parameters()))


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


def test_unused_parameter_is_a_warning():
    case = case_of(
        lambda: nn.ModuleDict({"used": nn.Linear(WIDTH, WIDTH), "unused": nn.Linear(2, 2)}),
        lambda model, batch: model["used"](batch).tanh().pow(2).mean(), CASE.batch,
    )  # fmt: skip
    with pytest.warns(UserWarning, match=r"unused\.weight.*: the loss does not depend on it"):
        pipe, _ = pipeline_of(case, ROWS, 2, optimizer=SGD)
    pipe.close()


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
