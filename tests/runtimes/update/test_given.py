"""An optimizer over the whole model, as plain PyTorch has it, in place of a function."""

import copy

import panpipe
import pytest
import torch
from torch import nn

from ...laws.grouped import grouped


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def step(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


BATCH = {"x": torch.randn(8, 8), "y": torch.arange(8) % 4}


def groups_of(model):
    decayed = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": decayed, "weight_decay": 0.3}, {"params": [p for p in model.parameters() if p.dim() < 2]}]


def pipeline_with(model, optimizer):
    return panpipe.pipeline(
        model, step, BATCH, optimizer=optimizer, microbatches=2, **grouped(contest=False, cache=False, progress=False)
    )


def test_groups_options_and_schedulers_are_those_of_one_process():
    model = made()
    alone = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(groups_of(each), lr=0.05, betas=(0.8, 0.9)) for each in (model, alone)]
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in optimizers]
    with pipeline_with(model, optimizers[0]) as pipe:
        for _ in range(3):
            pipe.step(BATCH)
            step(alone, BATCH).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            for scheduler in schedulers:
                scheduler.step()
        assert pipe.metrics.learning_rates == [0.00625, 0.00625]
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_options_of_a_checkpoint_are_those_of_the_optimizer():
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pipeline_with(model, optimizer) as pipe:
        optimizer.param_groups[0]["lr"] = 0.025
        pipe.step(BATCH)
        state = copy.deepcopy(pipe.state_dict())
        optimizer.param_groups[0]["lr"] = 0.1
        pipe.load_state_dict(state)
        assert optimizer.param_groups[0]["lr"] == 0.025
        assert pipe.metrics.learning_rates == [0.025]


def test_its_own_step_is_refused():
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pipeline_with(model, optimizer) as pipe:
        pipe.step(BATCH)
        optimizer.zero_grad()
        with pytest.raises(panpipe.RequestError, match=r"SGD\.step\(\) would update a second time"):
            optimizer.step()


class Slow(torch.optim.SGD):
    """An optimizer with a value that its groups do not have."""

    def __init__(self, params, lr=0.1, pace=1.0):
        super().__init__(params, lr=lr)
        self.pace = pace


def test_what_its_groups_do_not_have_is_refused_with_the_function_to_give():
    model = made()
    with pytest.raises(panpipe.RequestError, match=r"pace cannot be read.*optimizer=lambda p: Slow\(p, lr=0\.2"):
        pipeline_with(model, Slow(model.parameters(), 0.2, 0.5))
    with pytest.raises(panpipe.RequestError, match="that the model does not have"):
        pipeline_with(model, torch.optim.SGD(made().parameters(), lr=0.1))
