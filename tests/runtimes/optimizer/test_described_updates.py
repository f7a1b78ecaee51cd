"""Optimizers and schedulers as strings, by which ranks find that theirs differ."""

from functools import partial

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.optimizer.described_updates import describe_update
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, LinearLR, SequentialLR


def model():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def described(optimizer, scheduler=None, given=None):
    return describe_update(optimizer, scheduler, (given or model()).named_parameters())


def by_shape(decay):
    """Groups as training scripts form them: no decay of vectors."""

    def make(named):
        kept = [(name, p) for name, p in named if p.ndim > 1]
        return AdamW([{"params": kept}, {"params": [e for e in named if e[1].ndim < 2], "weight_decay": decay}])

    return make


def warmed_up(length):
    def make(optimizer):
        parts = [LinearLR(optimizer, 0.1, total_iters=length), CosineAnnealingLR(optimizer, 100)]
        return SequentialLR(optimizer, parts, [length])

    return make


@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        ((AdamW,), (SGD,), "optimizer"),
        ((None,), (AdamW,), "an optimizer"),
        ((AdamW,), (partial(AdamW, lr=1e-2),), "lr of '0.weight'"),
        ((AdamW,), (partial(AdamW, betas=(0.9, 0.95)),), "betas of '0.weight'"),
        ((partial(AdamW, lr=torch.tensor(1e-2)),), (partial(AdamW, lr=torch.tensor(1e-3)),), "lr of '0.weight'"),
        ((by_shape(0.0),), (by_shape(0.1),), "weight_decay of '0.bias'"),
        ((AdamW,), (AdamW, partial(ExponentialLR, gamma=0.9)), "a scheduler"),
        ((AdamW, partial(ExponentialLR, gamma=0.9)), (AdamW, partial(ExponentialLR, gamma=0.8)), "scheduler's gamma"),
        ((AdamW, warmed_up(10)), (AdamW, warmed_up(20)), "scheduler's _schedulers.0.total_iters"),
    ],
)
def test_updates_that_differ_are_described_differently(one, other, named):
    first, second = described(*one), described(*other)
    assert first.get(named) != second.get(named)


@pytest.mark.parametrize(
    "make",
    [
        (AdamW,),
        (by_shape(0.1), warmed_up(10)),
        (AdamW, lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (step + 1))),
    ],
)
def test_equal_updates_have_equal_texts_in_every_process(make):
    first, second = described(*make), described(*make)
    assert first == second
    assert not [text for text in first.values() if " at 0x" in text]


def test_frozen_parameters_are_not_described_and_those_on_meta_are():
    given = model().to("meta").requires_grad_(False)
    given[0].weight.requires_grad_(True)
    found = described(AdamW, given=given)
    assert found["lr of '0.weight'"] == "0.001"
    assert not [name for name in found if "bias" in name]


def test_function_that_fails_leaves_the_error_to_the_pipeline():
    def failing(named):
        raise ValueError("no")

    assert described(failing) == {"an optimizer": "True"}


def test_function_that_returns_no_optimizer_for_the_whole_model_is_refused():
    with pytest.raises(RequestError, match=r"optimizer returned None for all . trained .*return the optimizer"):
        described(lambda named: None)


def test_random_numbers_are_left_as_they_were():
    def drawing(named):
        torch.rand(1)
        return AdamW(named)

    given, before = model(), torch.get_rng_state()
    described(drawing, given=given)
    assert torch.equal(before, torch.get_rng_state())
