"""The layers of a model, found in the names of its operators."""

import pytest
from panpipe.core.costs.layers import layer_blocks


def blocks(text):
    """The blocks of operators in a text, with ``|`` between blocks."""
    return [" ".join(block) for block in layer_blocks(text.replace("|", " ").split())]


@pytest.mark.parametrize("text", [
    "emb/e | h.0.attn/mm h.0.mlp/mm | h.1.attn/mm h.1.mlp/mm | norm/n /loss",
    "0/linear | 1/gelu | 2/linear | 3/gelu | /loss",
    "0/linear | 1.0.a/mm 1.0.b/mm | 1.1.a/mm 1.1.b/mm | 2/linear",
    "0/embedding | 1.layers.0/mm | 1.layers.1/mm | 1.layers.2/mm | 2/head",
    "encoder.block.0.layer.0/a encoder.block.0.layer.1/b | encoder.block.1.layer.0/a encoder.block.1.layer.1/b",
    "stem/c | stage.0.conv/c stage.0.down/c stage.0.add/a | stage.1.conv/c stage.1.add/a | head/l",
    "layer3.attn layer3.mlp | layer4.attn layer4.mlp | head",
    "embed | layer_0 | layer_1 | head",
    "h.0/a /between h.0/b | h.1/a h.1/b",
])  # fmt: skip
def test_stages_may_end_between_the_outermost_modules_that_repeat(text):
    assert blocks(text) == [block.strip() for block in text.split("|")]
