"""Steps that are rehearsed between those of training: they change nothing."""

import logging
import random

import numpy
import panpipe
import pytest
import torch
from panpipe.core.errors import RequestError

from ...support.models import CASES
from ...support.training import pipeline_of

F32 = torch.float32


def everything(pipe):
    """All tensors that a step may change, with the states of the random number generators."""
    state = {f"state {name}": value for name, value in tensors_of(pipe.state_dict())}
    gradients = {f"gradient {n}": p.grad.clone() for n, p in pipe.model.named_parameters() if p.grad is not None}
    return {**state, **gradients, "torch": torch.get_rng_state()}


def tensors_of(value, name=""):
    if isinstance(value, torch.Tensor):
        yield name, value.detach().clone()
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from tensors_of(inner, f"{name}.{key}")


@pytest.mark.parametrize("name", ["batchnorm with a skip", "tied gpt with dropout"])
@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.5}, {"plan_options": {"split": True}}])
def test_rehearsed_steps_between_steps_of_training_change_no_bit(name, options):
    case, found = CASES[name], []
    for rehearsed in (False, True):
        random.seed(0), numpy.random.seed(0), torch.manual_seed(5)
        pipe, _ = pipeline_of(case, 8, 4, 2, optimizer=torch.optim.AdamW, **options)
        batches, seen = [case.batch(8, F32) for _ in range(3)], []
        for number, batch in enumerate(batches):
            seen.append(pipe.step(batch).item())
            held = {n: p.grad for n, p in pipe.model.named_parameters()}
            if rehearsed:
                before, counts = everything(pipe), (pipe.steps, pipe.updates, pipe.metrics, pipe.grad_norm)
                assert pipe.rehearsed_s(batches[(number + 1) % 3]) > 0
                (found_one,) = pipe.rehearse(batches[0], 1, update=True)  # with stand-ins of the optimizers
                steps = [{str(e.action) for e in each.trace.events} for each in (found_one, found_one.updated)]
                assert ["0STEP" in each for each in steps] == [False, True]
                assert same(before, everything(pipe))
                assert counts == (pipe.steps, pipe.updates, pipe.metrics, pipe.grad_norm)
                assert all(p.grad is held[n] for n, p in pipe.model.named_parameters())
        found.append((seen, everything(pipe), random.random(), numpy.random.random()))
        pipe.close()
    plain, turns = found
    assert plain[0] == turns[0]
    assert plain[2:] == turns[2:]
    assert same(plain[1], turns[1])


def test_rehearsed_steps_are_no_steps_of_logs_and_positions():
    case = CASES["batchnorm with a skip"]
    pipe, _ = pipeline_of(case, 8, 4, 2, optimizer=torch.optim.SGD)
    activities = pipe._trainer.team.activities.values()
    seen = []
    for _ in range(2):
        pipe.rehearse(case.batch(8, F32), steps=2, warm_up=1)
        record = logging.makeLogRecord({})
        panpipe.LogContext().filter(record)
        seen.append((record.step, {activity.text() for activity in activities}))
        pipe.step(case.batch(8, F32))
    pipe.close()
    assert seen == [(0, {"outside of panpipe"}), (1, {"outside of panpipe after step 1"})]


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_rehearsal_is_refused_where_it_would_change_something_or_measure_something_else():
    case = CASES["batchnorm with a skip"]
    pipe, _ = pipeline_of(case, 8, 4, 2, optimizer=torch.optim.SGD)
    with pytest.raises(RequestError, match="give the example batch"):
        pipe.rehearsed_s(case.batch(7, F32))
    assert not pipe.rehearses(case.batch(4, F32))
    pipe.step(case.batch(8, F32), update=False)
    with pytest.raises(RequestError, match="gradients wait for an update"):
        pipe.rehearsed_s(case.batch(8, F32))
    pipe.step(case.batch(8, F32))
    assert pipe.rehearses(case.batch(8, F32))


class Branching(torch.nn.Module):
    """Its branch on a value stays Python."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

    def forward(self, x):
        x = self.first(x)
        if x.sum() > 1e9:
            x = x * 2
        return self.last(x)


def test_step_that_keeps_python_is_not_rehearsed_between_steps():
    batch = {"x": torch.randn(8, 4)}
    pipe = panpipe.pipeline(
        Branching(), lambda model, batch: model(batch["x"]).square().mean(), batch, optimizer=torch.optim.SGD,
        microbatches=2, schedule="1f1b", plan_cache=False, plan_seconds=600, progress=False,
    )  # fmt: skip
    assert pipe.plan.prediction.rehearsed_s is None
    with pytest.raises(RequestError, match="stays Python"):
        pipe.rehearsed_s(batch)


def test_automatic_plan_has_the_time_of_its_rehearsed_step_and_a_traced_step_its_own():
    case = CASES["batchnorm with a skip"]
    batch = case.batch(8, F32)
    pipe = panpipe.pipeline(
        case.model(F32), case.step, batch, optimizer=torch.optim.SGD, microbatches=4, schedule="1f1b",
        plan_cache=False, plan_seconds=600, progress=False,
    )  # fmt: skip
    prediction = pipe.plan.prediction
    assert prediction.rehearsed_s > 0
    _, trace = pipe.trace_step(batch)
    assert trace.rehearsed_s > 0
    assert panpipe.simulate(pipe.plan).trace.rehearsed_s == prediction.rehearsed_s
