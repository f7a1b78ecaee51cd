"""Values that follow from numbers and sizes alone are known while a step is captured."""

import pytest
import torch
from panpipe.core.capture.export.step import capture_step
from torch import nn

MASK = nn.Transformer.generate_square_subsequent_mask(6)
MASKS = {
    "made in the step": lambda module, x: nn.Transformer.generate_square_subsequent_mask(x.shape[1]),
    "a buffer": lambda module, x: module.mask[: x.shape[1], : x.shape[1]],
    "a global": lambda module, x: MASK,
}


class Encoder(nn.Module):
    """Reads whether its mask is a causal one."""

    def __init__(self, mask="made in the step") -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.mask_of = MASKS[mask]
        self.register_buffer("mask", MASK)

    def forward(self, x):
        return self.encoder(x, mask=self.mask_of(self, x))


def loss_of(model, x):
    return model(x).square().mean()


@pytest.mark.parametrize("symbolic", [None, {0: (1,)}])
@pytest.mark.parametrize("mask", MASKS)
def test_a_transformer_with_a_mask_is_many_operators(mask, symbolic):
    captured = capture_step(Encoder(mask), loss_of, torch.zeros(2, 6, 8), symbolic=symbolic)
    assert captured.regions == {}
    assert sum("linear" in node.name for node in captured.graph.nodes) >= 8


class Reading(nn.Module):
    """Branches on a value that a function computes."""

    def __init__(self, value) -> None:
        super().__init__()
        self.linear, self.value = nn.Linear(4, 4), value
        self.register_buffer("flags", torch.ones(4))

    def forward(self, x):
        y = self.linear(x)
        return y if self.value(self, x) else y * 2


def written(module, x):
    flags = torch.zeros(4, dtype=torch.bool, device=x.device)
    flags[1:2] = True
    flags.logical_not_()
    return flags[1]


def of_the_batch(module, x):
    flags = torch.zeros(4)
    flags[0] = x[0, 0]
    return flags.any()


def written_from_a_buffer(module, x):
    flags = torch.zeros(4)
    row = flags[1:]
    flags.copy_(module.flags)
    return row.any()


def written_like_the_batch(module, x):
    flags = torch.ones(4)
    flags *= torch.zeros_like(x[0])
    return flags.any()


CALLS = {
    "written in place": (written, True),
    "a list": (lambda module, x: sum(torch.arange(x.shape[1]).tolist()) > 5, True),
    "equal": (lambda module, x: torch.equal(torch.ones(2).cumsum(0), torch.tensor([1.0, 2.0])), True),
    "written by the batch": (of_the_batch, False),
    "written from a buffer": (written_from_a_buffer, False),
    "written like the batch": (written_like_the_batch, False),
    "of a buffer": (lambda module, x: (module.flags * torch.ones(4)).sum() > 3, False),
    "of a parameter": (lambda module, x: module.linear.weight.sum() > 3, False),
    "drawn": (lambda module, x: torch.rand(4).sum() > 2, False),
}


@pytest.mark.parametrize("name", CALLS)
def test_values_of_numbers_are_known_and_others_are_not(name):
    value, known = CALLS[name]
    captured = capture_step(Reading(value), loss_of, torch.zeros(2, 4))
    assert (captured.regions == {}) is known


def test_other_sizes_with_another_value_need_another_capture():
    captured = capture_step(
        Reading(lambda module, x: torch.arange(x.shape[0]).sum() > 10), loss_of, torch.zeros(8, 4), symbolic={0: (0,)}
    )
    assert [captured.sizes.values({0: (rows, 4)}) is not None for rows in (8, 6, 5, 4, 64)] == [
        True, True, False, False, True,
    ]  # fmt: skip
