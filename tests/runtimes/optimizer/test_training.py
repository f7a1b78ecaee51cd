"""How a model is trained: what the settings ask of an update, and values that are refused."""

import functools

import pytest
import torch
from attrs import evolve
from panpipe.core.errors import RequestError
from panpipe.runtimes.optimizer.training import Training
from torch import nn

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def scaler(enabled=True):
    return torch.amp.GradScaler("cpu", init_scale=8.0, enabled=enabled)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({}, ()),
        ({"clip_norm": float("inf")}, ("clipping",)),
        ({"scaler": scaler()}, ("scaling",)),
        ({"scaler": scaler(enabled=False)}, ()),
        ({"clip_norm": 1.0, "scaler": scaler()}, ("clipping", "scaling")),
    ],
)
def test_update_needs_all_stages_for_a_norm_and_for_scaled_losses(options, parts):
    training = Training(**options)
    assert training.parts == parts
    assert training.needs_all_stages == bool(parts)
    assert (training.loss_scale() is not None) == ("scaling" in parts)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimizer": "adam"}, "optimizer is 'adam': give a class"),
        ({"clip_norm": 0}, "clip_norm is 0: gradients are clipped to a norm above 0"),
        ({"clip_norm": -1.0}, "clip_norm is -1.0"),
        ({"clip_norm": float("nan")}, "clip_norm is nan"),
        ({"clip_norm": True}, "clip_norm is True"),
        ({"clip_norm": "1"}, "clip_norm is '1'"),
        ({"scaler": 2.0}, r"scaler is 2\.0: losses are scaled by a torch\.amp\.GradScaler"),
        ({"scheduler": 3}, "scheduler is 3: give a function of an optimizer"),
    ],
)
def test_values_that_cannot_be_are_refused_in_one_line(options, said):
    with pytest.raises(RequestError, match=said) as error:
        Training(**options)
    assert "\n" not in str(error.value)


def test_scheduler_needs_an_optimizer_and_scaled_parameters_a_dtype_that_can_be_unscaled():
    plain, half = nn.Linear(2, 2), nn.Linear(2, 2).half()
    scheduled = Training(scheduler=lambda optimizer: None)
    with pytest.raises(RequestError, match="a scheduler needs an optimizer; give both"):
        scheduled.check(plain)
    evolve(scheduled, optimizer=SGD).check(plain)
    Training(optimizer=SGD).check(half)
    Training(scaler=scaler()).check(plain)
    with pytest.raises(RequestError, match="weight"):
        Training(scaler=scaler()).check(half)


def test_settings_are_what_ranks_must_share():
    first, second = Training(seed=1, clip_norm=2.0, scaler=scaler()), Training(seed=1, clip_norm=2.0, optimizer=SGD)
    assert first.settings["seed"] == 1
    assert first.settings["scaler"]["scale"] == 8.0
    assert second.settings["scaler"] is None
    assert evolve(first, scaler=scaler()).settings == first.settings
