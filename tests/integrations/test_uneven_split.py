"""A number of layers that is no multiple of the number of stages: no layer is left out (Megatron-LM#1304)."""

import copy

import panpipe
import pytest
import torch
from torch import nn

LAYERS = 5


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(LAYERS)]).double()


def step(model, batch):
    return model(batch["x"]).square().mean()


@pytest.mark.parametrize(
    "devices", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_every_layer_of_an_uneven_split_trains(devices):
    batch = {"x": torch.randn(8, 8, dtype=torch.float64)}
    model = make_model()
    alone = copy.deepcopy(model)
    with panpipe.pipeline(
        model, step, batch, optimizer=lambda named: torch.optim.SGD(named, lr=0.5), microbatches=4, mesh=devices,
        plan=panpipe.Auto(schedule="1f1b", max_chunks=1), run=panpipe.Run(progress=False),
    ) as pipe:  # fmt: skip
        held = [name for stage in pipe.plan.stages for name in stage.parameters]
        assert sorted(held) == sorted(name for name, _ in model.named_parameters())
        before = {name: parameter.clone() for name, parameter in model.named_parameters()}
        pipe.step(batch)
        panpipe.reference_step(alone, step, batch, microbatches=4)
        torch.optim.SGD(alone.parameters(), lr=0.5).step()
        for (name, parameter), other in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert not torch.equal(parameter, before[name]), name
            torch.testing.assert_close(parameter, other, rtol=1e-9, atol=1e-12)
