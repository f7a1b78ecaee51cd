"""Steps that a pipeline cannot train as one process does, and batches that it cannot cut: refused with the reason."""

import contextlib
import types
from collections.abc import Callable
from typing import Any

import panpipe
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence

OPTIONS: dict[str, Any] = {
    "microbatches": 2,
    "mesh": 2,
    "plan": panpipe.Auto(schedule="1f1b", max_chunks=1),
    "run": panpipe.Run(progress=False),
}
pytestmark = pytest.mark.filterwarnings("ignore:.* relates samples of the batch")
BATCH = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


def trained(model: nn.Module, step: Callable[[Any, Any], Any], *batches: Any) -> None:
    """Build a pipeline for the first batch, and train on all of them."""
    with panpipe.pipeline(model, step, batches[0], optimizer=torch.optim.SGD, **OPTIONS) as pipe:
        for batch in batches:
            pipe.step(batch)


def mean(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize("hidden", ["data", "detach", "no_grad"])
def test_write_of_an_activation_that_autograd_does_not_see(hidden):
    def step(model, batch):
        h = model(batch).tanh()
        with torch.no_grad() if hidden == "no_grad" else contextlib.nullcontext():
            (h.data if hidden == "data" else h.detach() if hidden == "detach" else h).mul_(0.5)
        return h.mean()

    with pytest.raises(panpipe.RequestError, match=r"test_refusals.py:\d+: this line writes, by .data, .detach"):
        trained(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), step, BATCH)


@torch.library.custom_op("panpipe_tests::never_backward", mutates_args=())
def never_backward(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def refuse(ctx: Any, gradient: torch.Tensor) -> None:
    raise ValueError("no derivative")


never_backward.register_fake(torch.empty_like)
never_backward.register_autograd(refuse)


def test_operator_whose_backward_raises():
    with pytest.raises(panpipe.RequestError, match="backward cannot be traced: ValueError: no derivative"):
        trained(nn.Linear(4, 4), lambda model, batch: never_backward(model(batch)).mean(), BATCH)


class Gate(nn.Module):
    """Needs a value, so it stays Python, and then does this."""

    def __init__(self, run: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.table, self.run = nn.Linear(4, 4), nn.Embedding(4, 4), run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum().item() > 1e9:
            x = 2 * x
        return self.run(self, x)


def replaced(gate: Any, x: torch.Tensor) -> torch.Tensor:
    gate.layer.weight.data = torch.ones(4, 4)
    return gate.layer(x)


GATES = {
    "writes its argument": (lambda gate, x: gate.layer(x.mul_(2)), "module '1' writes its arguments in place"),
    "assigns data": (replaced, r"assigns \.data of its parameter 'layer.weight'"),
    "sparse gradients": (
        lambda gate, x: gate.layer(x) + F.embedding(x.argmax(-1), gate.table.weight, sparse=True),
        "has sparse gradients",
    ),
    "other draws": (
        lambda gate, x: gate.layer(x) * (torch.rand(4) if x[0, 0] > 50 else 1),
        "draws 1 random tensors here and drew 0",
    ),
    "other shapes": (lambda gate, x: gate.layer(x)[:, : 2 if x[0, 0] > 50 else 4], "returns tensors of shapes"),
}


@pytest.mark.parametrize(("run", "said"), GATES.values(), ids=GATES)
def test_module_that_stays_python_and_cannot(run, said):
    first = nn.Linear(4, 4)
    with torch.no_grad():
        first.weight.copy_(torch.eye(4))
        first.bias.zero_()
    with pytest.raises(panpipe.PanpipeError, match=said):
        trained(nn.Sequential(first, Gate(run), nn.Linear(4, 4)), mean, BATCH, BATCH + 100)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (
            {"x": BATCH, "other": types.SimpleNamespace(y=BATCH)},
            "is a types.SimpleNamespace, whose tensors are unknown",
        ),
        ({"x": pack_sequence([BATCH[0], BATCH[1]])}, r"batch\['x'\] is a PackedSequence.* give the padded tensor"),
    ],
)
def test_batch_of_unknown_containers(batch, said):
    with pytest.raises(panpipe.RequestError, match=said):
        trained(nn.Linear(4, 4), lambda model, batch: mean(model, batch["x"]), batch)


@pytest.mark.parametrize("access", [lambda p: p.grad, lambda p: setattr(p, "grad", None)], ids=["read", "clear"])
def test_gradient_within_a_step(access):
    def step(model, batch):
        access(model[0].weight)
        return mean(model, batch)

    with pytest.raises(panpipe.RequestError, match=r"gradient.* parameter '0\.weight'"):
        trained(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), step, BATCH)


def test_model_that_was_built_under_inference_mode():
    with torch.inference_mode():
        model = nn.Linear(4, 4)
    with pytest.raises(
        panpipe.RequestError, match=r"parameter 'weight' was created under torch.inference_mode\(\).*: "
    ):
        trained(model, mean, BATCH)


def test_traceback_of_a_refusal_has_the_callers_frames_alone():
    with pytest.raises(panpipe.RequestError, match="microbatches is 0") as raised:
        panpipe.pipeline(nn.Linear(2, 2), lambda model, batch: model(batch).sum(), torch.ones(4, 2), microbatches=0)
    assert len(raised.traceback) == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda: panpipe.weights.ema(nn.Linear(1, 1)),
        lambda: panpipe.simulate("plan.json"),
        lambda: panpipe.validate(3),
        lambda: panpipe.traces.write_trace(3, "a.json"),
        lambda: panpipe.latest_checkpoint(3),
        lambda: panpipe.schedules.ScheduleProblem(devices=2, microbatches="8"),
    ],
)
def test_argument_of_another_type_is_refused_with_the_fix(call):
    with pytest.raises(panpipe.RequestError, match=r" is .*: give "):
        call()
