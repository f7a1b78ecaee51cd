"""Forwards alone: the loss and the rows of one process to the last bit, nothing saved, and training none the wiser."""

import json
import warnings

import panpipe
import pytest
import torch
from attrs import evolve
from panpipe.cli import main
from panpipe.core.actions import Kind
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.errors import RequestError
from panpipe.core.plan.plan import Prediction, plan_json
from panpipe.core.trace.perfetto import trace_json
from panpipe.core.trace.perfetto_reader import read_trace
from panpipe.runtimes.programs.stage_run import StageRun
from torch import nn
from torch.nn import functional as F

from ...support.cuts import captured, even_plan
from ...support.models import CASES, PYTHON, TinyGPT, gpt_step, tokens, weighted_step
from ...support.plans import UNIT
from ...support.programs.evaluation import joined_alone, loss_alone, state
from ...support.training import SGD, case_of, pipeline_of, unequal

F32 = torch.float32
pytestmark = pytest.mark.filterwarnings("ignore:microbatches of a new shape")


GPT = case_of(TinyGPT, gpt_step, lambda rows, dtype: tokens(rows))
WEIGHTED = case_of(TinyGPT, weighted_step, lambda rows, dtype: tokens(rows))
WORDS = case_of(
    lambda: nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 8), nn.Linear(8, 32)), gpt_step,
    lambda rows, dtype: tokens(rows),
)  # fmt: skip
"""Like `GPT`, for tests that capture many functions."""
ALL = {"weighted": WEIGHTED, "batchnorm": CASES["batchnorm with a skip"], "python": PYTHON}


def logits(model, batch):
    return model(batch["x"])


@pytest.mark.parametrize("name", ALL)
def test_evaluation_has_the_loss_of_one_process_and_changes_nothing(name):
    case = ALL[name]
    pipe, alone = pipeline_of(case, 8, 4, optimizer=SGD)
    pipe.step(case.batch(8, F32))
    alone.load_state_dict(pipe._session.model.state_dict())
    before = state(pipe._session.model)
    pipe._session.model.eval()
    alone.eval()
    for rows in (8, 3, 5):
        batch = case.batch(rows, F32)
        loss = pipe.evaluate(batch)
        assert torch.equal(loss, loss_alone(alone, case.step, batch, 4))
        assert not loss.requires_grad
    assert not unequal(before, state(pipe._session.model))
    assert (pipe.metrics.steps, pipe.metrics.updates) == (1, 1)
    if name == "weighted":
        assert 0 < pipe.metrics["confidence"] <= 1
    with pytest.raises(RequestError, match=r"the model is in evaluation mode .* model.train\(\)"):
        pipe.step(case.batch(8, F32))
    pipe._session.model.train()
    pipe.step(case.batch(8, F32))


def test_evaluation_does_not_change_later_training():
    case = ALL["batchnorm"]
    (evaluated, _), (untouched, _) = (pipeline_of(case, 8, 4, optimizer=SGD) for _ in range(2))
    for rows in (8, 6, 8):
        evaluated._session.model.eval()
        evaluated.evaluate(case.batch(rows, F32))
        evaluated._session.model.train()
        evaluated.evaluate(case.batch(8, F32))  # with BatchNorm in training mode: no statistics are written
        evaluated.forward(case.batch(5, F32), logits)
        for pipe in (evaluated, untouched):
            pipe.step(case.batch(rows, F32))
    assert not unequal(state(evaluated._session.model), state(untouched._session.model))


def test_evaluation_in_training_mode_draws_separate_dropout_and_one_module_may_be_in_evaluation_mode():
    pipe, alone = pipeline_of(GPT, 8, 4)
    found = [pipe.evaluate(tokens(8)) for _ in range(2)]
    wanted = [loss_alone(alone, GPT.step, tokens(8), 4, index=index) for index in (-1, -2)]
    assert [loss.item() for loss in found] == [loss.item() for loss in wanted]
    assert found[0] != found[1]
    pipe._session.model.blocks[0].eval()
    alone.blocks[0].eval()
    assert torch.equal(pipe.evaluate(tokens(8)), loss_alone(alone, GPT.step, tokens(8), 4, index=-3))


# What runs, and what it holds


def test_trace_of_an_evaluation_has_forwards_and_messages_only():
    pipe, _ = pipeline_of(GPT, 8, 4, plan_options={"schedule_name": "zb-v", "chunks": 2})
    _, trained = pipe.trace_step(tokens(8))
    assert max(sample.bytes for sample in trained.memory) > 0
    pipe._session.model.eval()
    loss, trace = pipe.trace_step(tokens(8), evaluate=True)
    assert torch.equal(loss, pipe.evaluate(tokens(8)))
    assert {event.action.kind for event in trace.events} == {Kind.F, Kind.SEND_F, Kind.RECV_F}
    assert sum(event.action.kind is Kind.F for event in trace.events) == 4 * 4
    assert [sample.bytes for sample in trace.memory if sample.bytes] == []  # by the storages' finalizers
    assert trace.plan_hash != trained.plan_hash


def test_threads_run_the_simulated_order_of_forwards(tmp_path, capsys):
    operators = captured(GPT, F32, 8, 4)
    even = even_plan(operators, 2, 4, "zb-v", 2)
    costs = tuple(evolve(UNIT, forward_s=s, saved_bytes=10**6) for s in (3, 1, 1, 2))
    cluster = fully_connected(2, 10**12, 1e9, 1e-6)
    plan = evolve(even, prediction=Prediction(costs, cluster, 0, (0, 0), (0, 0), 0))
    pipe = panpipe.pipeline(
        GPT.model(F32), GPT.step, tokens(8), plan=plan, optimizer=SGD, update=panpipe.Update(clip_norm=1.0)
    )
    _, trace = pipe.trace_step(tokens(8), evaluate=True)
    file, measured, simulated = (tmp_path / name for name in ("plan.json", "measured.json", "simulated.json"))
    file.write_text(plan_json(pipe.plan), encoding="utf-8")
    measured.write_text(trace_json(trace), encoding="utf-8")
    assert main(["simulate", str(file), "--forward-only", "--trace", str(simulated)]) == 0
    capsys.readouterr()
    report = ["--plan", str(file), "--report", str(tmp_path / "report.html")]
    assert main(["compare", str(simulated), str(measured), "--json", *report]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["same_plan"]
    assert found["order"] == found["only_predicted"] == found["only_measured"] == []
    assert [kind["kind"] for kind in found["kinds"]] == ["F"]
    assert [kind["kind"] for kind in found["transfers"]] == ["SEND_F", "RECV_F"]
    queues = {(event.device, event.queue) for event in trace.events}
    assert queues == {(event.device, event.queue) for event in read_trace(simulated).events}


def test_evaluation_frees_everything(monkeypatch):
    pipe, _ = pipeline_of(GPT, 8, 4)
    forward, held = StageRun.forward, list[StageRun]()

    def noted(run, *given):
        held.append(run)
        return forward(run, *given)

    monkeypatch.setattr(StageRun, "forward", noted)
    pipe.evaluate(tokens(8))
    assert held
    assert all(not run.held(m) for run in held for m in range(4))


def test_simulated_evaluation_takes_the_time_of_its_forwards():
    batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))

    def model():
        torch.manual_seed(0)
        return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh())))

    def square(model, x):
        return model(x).square().mean()

    case = case_of(model, square, lambda rows, dtype: batch[:rows])
    simulated, alone = pipeline_of(case, 8, 4, simulated="2xA100-80GB", optimizer=SGD)
    _, trained = simulated.trace_step(batch)
    alone.load_state_dict(simulated._session.model.state_dict())
    simulated._session.model.eval()
    loss, trace = simulated.trace_step(batch, evaluate=True)
    assert torch.equal(loss, loss_alone(alone.eval(), square, batch, 4))
    assert trace.source == "simulated"
    assert {event.action.kind for event in trace.events} == {Kind.F, Kind.SEND_F, Kind.RECV_F}
    assert 0 < trace.step_s < trained.step_s
    assert not any(sample.bytes for sample in trace.memory if sample.kind == "saved")
    forward_s = {e.action.stage: e.end_s - e.start_s for e in trained.events if e.action.kind is Kind.F}
    for event in trace.events:
        if event.action.kind is Kind.F:
            assert event.end_s - event.start_s == pytest.approx(forward_s[event.action.stage])
    rows = simulated.forward(batch[:5], lambda model, x: model(x))
    assert torch.equal(rows, joined_alone(alone, lambda model, x: model(x), batch[:5], 4))


# Rows


REFUSED = (
    (lambda model, batch: model(batch["x"]).mean(), "returns a scalar for 2 samples"),
    (lambda model, batch: {"n": 3, "x": model(batch["x"])}, "returns 3 for 2 samples"),
    (lambda model, batch: ("a", model(batch["x"])), "returns 'a' for 2 samples"),
    (lambda model, batch: model(batch["x"])[0], r"a tensor of shape \(12, 32\) for 2 samples"),
    (lambda model, batch: None, "returns no tensor"),
    (lambda model, batch: F.pad(model(batch["x"]), (0, len(batch["x"]))), "2×12×34 of float32 for 2 .* 1×12×33"),
    ("model", "function is 'model': give a function"),
)


def test_function_without_a_row_for_each_sample_is_refused_and_rows_share_no_memory_with_the_batch():
    pipe, _ = pipeline_of(WORDS, 8, 4)
    for function, said in REFUSED:
        with pytest.raises(RequestError, match=said) as refusal:
            pipe.forward(tokens(7), function)
        assert "\n" not in str(refusal.value)
    batch = tokens(8)
    found = pipe.forward(batch, lambda model, batch: (model(batch["x"]), batch["x"]))
    assert found[0].shape == (8, 12, 32)
    found[1].zero_()
    assert batch["x"].any()


def test_evaluation_uses_a_parameter_that_training_does_not_use():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head, self.other = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            return self.head(self.body(x))

    case = case_of(Heads, lambda model, x: model(x).square().mean(), lambda rows, dtype: torch.ones(rows, 8))
    with pytest.warns(UserWarning, match="the loss does not depend on it"):
        pipe, _ = pipeline_of(case, 8, 4)
    with torch.no_grad():
        wanted = pipe._session.model.other(pipe._session.model.body(case.batch(8, F32)))
    assert torch.equal(pipe.forward(case.batch(8, F32), lambda model, x: model.other(model.body(x))), wanted)


def test_evaluation_warns_once_of_new_shapes_and_keeps_a_few_functions(monkeypatch):
    monkeypatch.setattr("panpipe.runtimes.batch.shapes.NOTICED_S", 0.0)
    pipe, _ = pipeline_of(WORDS, 8, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.forward(tokens(8), logits)
        pipe.forward(tokens(8), logits)
    with pytest.warns(UserWarning, match="microbatches of a new shape") as said:
        pipe.forward(tokens(4), logits)
    assert said[0].filename == __file__
    for _ in range(5):
        pipe.forward(tokens(8), lambda model, batch: model(batch["x"]))
    assert len(list(pipe._trainer.evaluator._kept)) == 4
