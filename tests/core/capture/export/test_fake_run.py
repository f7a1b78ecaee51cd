"""A run of the captured graph on fake tensors: draws, layouts, and which tensors get a gradient."""

import pytest
import torch
from panpipe.core.capture.export.operators import FakeRun, fake_inputs, operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.capture.regions.modes import CASTS
from panpipe.core.errors import RequestError
from torch import nn


def run_of(step, model=None, batch=None):
    model = model or nn.Linear(3, 3)
    with torch.enable_grad():
        captured = capture_step(model, step, torch.ones(2, 3) if batch is None else batch)
        run = FakeRun(captured)
        with captured.fake_mode:
            run.run(*fake_inputs(captured))
    return captured, run


def named(captured, part):
    return [n.name for n in captured.graph.nodes if n.op == "call_function" and part in str(n.target)]


def test_draws_are_numbered_over_the_whole_step():
    def step(model, batch):
        drawn = torch.rand(2, 3)
        hidden = nn.functional.dropout(model(batch), 0.5)
        return (nn.functional.dropout(hidden, 0.5) + drawn).mean()

    captured, run = run_of(step)
    first, second = named(captured, "dropout")
    (rand,) = named(captured, "rand")
    assert run.first_draw == {rand: 0, first: 1, second: 2}


def test_values_require_gradients_where_they_flow():
    captured, run = run_of(lambda model, batch: (model(batch) + batch.exp()).mean())
    (linear,), (exp,) = named(captured, "linear"), named(captured, "exp")
    assert run.values[linear].requires_grad
    assert not run.values[exp].requires_grad
    assert tuple(run.values[linear].shape) == (2, 3)


def test_strided_results_and_gradients_are_found():
    captured, run = run_of(lambda model, batch: (model(batch).relu().t().contiguous() @ batch.exp()).sum())
    (transposed,), (relu,) = named(captured, "aten.t."), named(captured, "relu")
    assert transposed in run.strided
    assert relu not in run.strided
    run.note_gradients(captured.outputs.loss)
    assert relu in run.strided  # its gradient is that of a transposed tensor
    assert not any(name in run.strided for name in named(captured, "exp"))


def test_tensors_without_a_gradient_are_detached():
    def step(model, batch):
        hidden = model(batch)
        probe = hidden.exp()
        return hidden.square().mean(), 1.0, {"probe": probe.sum()}

    captured, run = run_of(step)
    (probe,), (square,) = named(captured, "exp"), named(captured, "pow") or named(captured, "square")
    assert run.values[probe].requires_grad
    run.note_gradients(captured.outputs.loss)
    assert not run.values[probe].requires_grad
    assert run.values[square].requires_grad
    assert run.values[captured.outputs.loss].requires_grad


def test_tensor_that_is_written_afterwards_keeps_its_gradient():
    captured, run = run_of(lambda model, batch: (model(batch) * 2).add_(1).sum())
    run.note_gradients(captured.outputs.loss)
    assert all(run.values[name].requires_grad for name in (*named(captured, "add_"), *named(captured, "linear")))


def test_hooks_are_removed_after_the_backward():
    captured, run = run_of(lambda model, batch: model(batch).mean())
    assert run._hooks
    run.note_gradients(captured.outputs.loss)
    assert not run._hooks


def test_casts_of_autocast_are_recorded_at_their_operator():
    def step(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(batch).float().mean()

    captured, _ = run_of(step)
    (linear,) = (n for n in captured.graph.nodes if n.op == "call_function" and "linear" in str(n.target))
    by_name = {captured.parameters[placeholder]: dtype for placeholder, dtype in linear.meta[CASTS].items()}
    assert by_name == {"weight": torch.bfloat16, "bias": torch.bfloat16}


def test_constants_become_fake():
    table = torch.arange(3.0)
    captured, run = run_of(lambda model, batch: (model(batch) * table).mean())
    (constant,) = captured.constants
    assert run.values[constant].fake_mode is captured.fake_mode
    assert tuple(run.values[constant].shape) == (3,)


@torch.library.custom_op("panpipe_tests::never_backward", mutates_args=())
def never_backward(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@never_backward.register_fake
def _(x):
    return torch.empty_like(x)


def refused(ctx, gradient):
    raise ValueError("no derivative")


never_backward.register_autograd(refused)


def test_backward_that_fails_is_refused_and_hooks_are_removed():
    captured, run = run_of(lambda model, batch: never_backward(model(batch)).mean())
    with pytest.raises(RequestError, match="the step's backward cannot be traced: ValueError: no derivative"):
        run.note_gradients(captured.outputs.loss)
    assert not run._hooks


@pytest.mark.parametrize("hidden", ["data", "detach", "no_grad"])
def test_write_that_autograd_does_not_see_is_refused_with_its_line(hidden):
    def step(model, batch):
        h = model(batch).tanh()
        with torch.no_grad() if hidden == "no_grad" else torch.enable_grad():
            (h.data if hidden == "data" else h.detach() if hidden == "detach" else h).mul_(0.5)
        return h.mean()

    with pytest.raises(RequestError, match=r"test_fake_run.py:\d+: this line writes, by .data, .detach\(\) or under"):
        operators_of(capture_step(nn.Linear(3, 3), step, torch.ones(2, 3)))


def test_operator_that_fails_is_refused_with_its_line():
    def step(model, batch):
        return model(batch).mean()

    captured, _ = run_of(step)
    next(n for n in captured.graph.nodes if "mean" in str(n.target)).args = (3,)
    with (
        captured.fake_mode,
        pytest.raises(
            RequestError, match=rf"{__file__}:\d+: aten.mean.default cannot run by itself, outside of the step: .*"
        ),
    ):
        FakeRun(captured).run(*fake_inputs(captured))
