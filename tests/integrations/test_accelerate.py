"""A loop of accelerate around a pipeline, against the same loop in one process."""

import copy

import pytest
import torch
from accelerate import Accelerator
from panpipe.core.errors import RequestError
from panpipe.integrations.accelerate import pipeline_accelerator, prepare
from torch import nn

from ..laws.grouped import grouped

OPTIONS = grouped(microbatches=4, schedule="1f1b", max_chunks=1, progress=False)


def make_model():
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(8, 1)).double()


def data():
    draw = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(8, generator=draw).double(), "y": torch.ones(1).double()} for _ in range(48)]


def step(model, batch):
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def optimizer_of(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def alone(model):
    """The loop of accelerate's documentation."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = accelerator.prepare(torch.utils.data.DataLoader(data(), batch_size=8))
    model, optimizer, scheduler = accelerator.prepare(model, *optimizer_of(model))
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = step(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append((loss.item(), optimizer.param_groups[0]["lr"]))
    return losses


def piped(model, folder):
    """The same with a pipeline; its state is saved after the fourth batch and loaded after the sixth."""
    accelerator = pipeline_accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = accelerator.prepare(torch.utils.data.DataLoader(data(), batch_size=8))
    pipe, optimizer, scheduler = prepare(accelerator, model, step, next(iter(loader)), *optimizer_of(model), **OPTIONS)
    losses = []
    for number, batch in enumerate(loader):
        with accelerator.accumulate():
            loss = pipe.step(batch)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append((loss.item(), optimizer.param_groups[0]["lr"]))
        if number == 3:
            accelerator.save_state(folder)
    trained = copy.deepcopy(model.state_dict())
    accelerator.load_state(folder)
    for batch in list(loader)[4:]:
        with accelerator.accumulate():
            pipe.step(batch)
            optimizer.step()
            scheduler.step()
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())
    pipe.close()
    return losses


def test_accelerate_loop_equals_that_of_one_process(tmp_path):
    wanted, found = make_model(), make_model()
    losses = alone(wanted)
    torch.testing.assert_close(piped(found, str(tmp_path)), losses, rtol=1e-9, atol=0)
    for (name, mine), other in zip(found.named_parameters(), wanted.parameters(), strict=True):
        assert (mine - other).norm() <= 1e-9 * other.norm(), name


def test_accelerate_refuses_mixed_precision():
    with pytest.raises(RequestError, match="autocast"):
        pipeline_accelerator(mixed_precision="bf16")
