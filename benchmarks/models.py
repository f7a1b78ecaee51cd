"""Six models of different kinds. By default their steps take two workers of one thread about a quarter of a second.

`MODELS` has functions that return (model, step, batch), the batch being cut into ``MICROBATCHES``.
"""

from collections.abc import Callable

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

MICROBATCHES = 8
Batch = dict[str, Tensor]
Case = tuple[nn.Module, Callable[[nn.Module, Batch], Tensor], Batch]


def _text(rows: int, length: int, vocabulary: int) -> Batch:
    drawn = torch.randint(2, vocabulary, (rows, length + 1), generator=torch.Generator().manual_seed(1))
    return {"x": drawn[:, :-1].contiguous(), "y": drawn[:, 1:].contiguous()}


def _images(rows: int, size: int, classes: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(rows, 3, size, size, generator=generator),
        "y": torch.randint(0, classes, (rows,), generator=generator),
    }


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of every token's successor."""
    logits = model(input_ids=batch["x"]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())


def classify(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of an image's class."""
    logits = model(pixel_values=batch["x"]).logits
    return F.cross_entropy(logits, batch["y"])


def gpt2(width: int = 256, layers: int = 6, vocabulary: int = 1024) -> nn.Module:
    """A decoder with learned positions, dropout, and its embedding tied to its head."""
    config = transformers.GPT2Config(
        vocab_size=vocabulary, n_positions=128, n_embd=width, n_layer=layers, n_head=8, use_cache=False,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def bert(width: int = 256, layers: int = 6, vocabulary: int = 2048) -> nn.Module:
    """An encoder with a layer norm after each block, and with a head that predicts every token."""
    config = transformers.BertConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=4 * width, max_position_embeddings=256,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def vit() -> nn.Module:
    """A vision transformer over patches."""
    config = transformers.ViTConfig(
        hidden_size=256, num_hidden_layers=6, num_attention_heads=4, intermediate_size=1024, image_size=96,
        patch_size=8, num_labels=100,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def resnet() -> nn.Module:
    """A residual network: convolutions and BatchNorm, large activations first and many weights at the end."""
    config = transformers.ResNetConfig(
        embedding_size=32, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic", num_labels=100
    )
    return transformers.ResNetForImageClassification(config)


def t5(width: int = 256, layers: int = 4, vocabulary: int = 1024) -> nn.Module:
    """Encoder and decoder: the encoder's output is read by every layer of the decoder, several stages away."""
    config = transformers.T5Config(
        vocab_size=vocabulary, d_model=width, d_kv=width // 8, d_ff=4 * width, num_layers=layers,
        num_decoder_layers=layers, num_heads=8, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
        use_cache=False,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that a model of transformers computes itself."""
    return model(input_ids=batch["x"], labels=batch["y"]).loss  # type: ignore[no-any-return]


def llama(width: int = 256, layers: int = 6, vocabulary: int = 2048) -> nn.Module:
    """A decoder with rotary positions, grouped queries and gated layers, its head untied."""
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=256, use_cache=False, bos_token_id=0,
        eos_token_id=1,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


MODELS: dict[str, Callable[[], Case]] = {
    "GPT-2": lambda: (gpt2(), next_token, _text(8, 128, 1024)),
    "BERT": lambda: (bert(), next_token, _text(8, 128, 2048)),
    "ViT": lambda: (vit(), classify, _images(8, 96, 100)),
    "ResNet": lambda: (resnet(), classify, _images(16, 64, 100)),
    "T5": lambda: (t5(), own_loss, _text(8, 96, 1024)),
    "Llama": lambda: (llama(), next_token, _text(8, 192, 2048)),
}
"""By name."""
