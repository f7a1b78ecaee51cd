"""After ``panpipe.pipeline(...)`` returns, the model is as it was: tensors, and all attributes of every module.

A flag that the first step sets for all later ones is set, as after a step in eager.
"""

import enum
import warnings
from typing import Any

import panpipe
import pytest
import torch
from torch import Tensor, nn

from .zoo.models import ZOO

FAST = ("Moving centre", "Vector quantiser", "PlainResNet", "Parametrized")
"""Buffers that a forward writes, averages, BatchNorm, and weights that are computed."""
MODELS = (
    *FAST, "LSTM", "Halting", "Routed", "Spectral", "Checked", "GAN", "CTC", "Normalising flow", "Distillation",
    "Warped images", "U-Net", "Hypernetwork", "Task of the batch", "Packed lengths", "GPT-2", "Mixtral", "ViT", "T5",
)  # fmt: skip


def state(value: Any, depth: int = 0) -> Any:
    """What can be compared later: values of tensors and of plain data, the identity of everything else."""
    if isinstance(value, Tensor):
        gradient = None if value.grad is None else value.grad.clone()
        return id(value), value.dtype, value.requires_grad, value.detach().clone(), gradient
    if isinstance(value, nn.Module | enum.Enum) or depth > 5:
        return id(value)
    if isinstance(value, dict):
        return [(key, state(item, depth + 1)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [state(item, depth + 1) for item in value]
    if isinstance(value, int | float | str | bool | set | frozenset | torch.dtype | torch.device | None):
        return type(value), str(value)
    return id(value), None if isinstance(value, type) else state(getattr(value, "__dict__", {}), depth + 1)


def changed(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor):
        return not torch.equal(before, after)
    if isinstance(before, list | tuple):
        return type(before) is not type(after) or len(before) != len(after) or any(map(changed, before, after))
    return bool(before != after)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in MODELS])
def test_model_is_as_it_was(name):
    entry = ZOO[name]
    torch.manual_seed(0)
    model, batch = entry.make().train(), entry.batch(6)
    before = {path: state(vars(module)) for path, module in model.named_modules()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = panpipe.pipeline(
            model, entry.step, batch, optimizer=torch.optim.AdamW, microbatches=3, run=panpipe.Run(progress=False)
        )
    after = {path: state(vars(module)) for path, module in model.named_modules()}
    pipe.close()
    assert list(before) == list(after)
    for path, attributes in before.items():
        found = dict(after[path])
        assert [name for name, value in attributes if name not in found or changed(value, found[name])] == [], path
        assert len(found) == len(attributes), path


class Prepared(nn.Module):
    """A model that prepares itself in its first step, as a configuration gets the kind of its labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.kind = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), None

    def forward(self, x: Tensor) -> Tensor:
        if self.kind is None:
            self.kind = "regression" if x.is_floating_point() else "classes"
        return self.layers(x).square().mean() if self.kind == "regression" else self.layers(x).mean()


def test_a_flag_that_the_first_step_sets_is_set():
    model, batch = Prepared(), torch.randn(4, 4)
    with panpipe.pipeline(
        model, lambda model, batch: model(batch), batch, optimizer=torch.optim.SGD, microbatches=2, plan="1f1b",
        run=panpipe.Run(progress=False),
    ) as pipe:  # fmt: skip
        assert model.kind == "regression"
        pipe.step(batch)
        assert model.kind == "regression"


class Warming(nn.Module):
    """A model whose first step differs from all others by what ``first`` says."""

    def __init__(self, first: str) -> None:
        super().__init__()
        self.layers, self.first, self.ready = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), first, False

    def forward(self, x: Tensor) -> Tensor:
        scale, factor = 3.0, self.layers[0].weight
        if not self.ready and self.first == "number":
            scale = 2.0
        if not self.ready and self.first == "parameter":
            factor = self.layers[1].weight
        with torch.autocast("cpu", torch.bfloat16, enabled=not self.ready and self.first == "autocast"):
            loss = (self.layers(x) @ factor).square().mean() * scale
        self.ready = True
        return loss


@pytest.mark.parametrize("first", ["nothing", "number", "parameter", "autocast"])
def test_later_steps_equal_eager_whatever_the_first_step_computes(first):
    torch.manual_seed(0)
    model, batch = Warming(first), torch.randn(4, 4)
    eager = Warming("nothing")
    eager.load_state_dict(model.state_dict())
    with panpipe.pipeline(
        model, lambda model, batch: model(batch), batch, optimizer=torch.optim.SGD, microbatches=1, plan="1f1b",
        run=panpipe.Run(progress=False),
    ) as pipe:  # fmt: skip
        assert float(pipe.step(batch)) == pytest.approx(eager(batch).item(), rel=1e-5)
        assert model.ready


class Meter(nn.Module):
    """A model whose step writes its lists and counts by local names, as logs are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.losses, self.counts = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [], {"steps": 0}

    def forward(self, x: Tensor) -> Tensor:
        loss = self.layers(x).square().mean()
        losses = self.losses
        losses.append(loss.item())
        counts = self.counts
        counts["steps"] += 1
        return loss


def test_what_a_step_writes_by_local_names_is_reported_and_stays():
    model, batch = Meter(), torch.randn(4, 4)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with panpipe.pipeline(
            model, lambda model, batch: model(batch), batch, optimizer=torch.optim.SGD, microbatches=2, plan="1f1b",
            run=panpipe.Run(progress=False),
        ) as pipe:  # fmt: skip
            for _ in range(3):
                pipe.step(batch)
    texts = [str(warning.message) for warning in seen]
    assert all(any(f"'{name}'" in text for text in texts) for name in ("losses", "counts"))
    assert model.losses == []
    assert model.counts == {"steps": 0}
