"""Steps that a pipeline cannot train as one process does, and batches that it cannot cut: refused with the reason."""

import contextlib
import types
from collections.abc import Callable
from typing import Any

import panpipe
import pytest
import torch
from torch import nn
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
