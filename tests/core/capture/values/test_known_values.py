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
