"""Six models of different kinds, whose steps take two workers of one thread about a quarter of a second.

Each is a function that returns (model, step, batch), the batch being cut into ``MICROBATCHES``.
"""

from collections.abc import Callable

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

MICROBATCHES = 8
Batch = dict[str, Tensor]
Case = tuple[nn.Module, Callable[[nn.Module, Batch], Tensor], Batch]


def _tokens(generator: torch.Generator, rows: int, length: int, vocabulary: int) -> Tensor:
    return torch.randint(2, vocabulary, (rows, length), generator=generator)


def _text(rows: int, length: int, vocabulary: int) -> Batch:
    drawn = _tokens(torch.Generator().manual_seed(1), rows, length + 1, vocabulary)
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


def gpt2() -> Case:
    """A decoder with learned positions, dropout, and its embedding tied to its head."""
    config = transformers.GPT2Config(
        vocab_size=1024, n_positions=128, n_embd=256, n_layer=6, n_head=8, use_cache=False,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config), next_token, _text(8, 128, 1024)


def bert() -> Case:
    """An encoder with a layer norm after each block, and with a head that predicts every token."""
    config = transformers.BertConfig(
        vocab_size=2048, hidden_size=256, num_hidden_layers=6, num_attention_heads=4, intermediate_size=1024,
        max_position_embeddings=128,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config), next_token, _text(8, 128, 2048)


def vit() -> Case:
    """A vision transformer over patches."""
    config = transformers.ViTConfig(
        hidden_size=256, num_hidden_layers=6, num_attention_heads=4, intermediate_size=1024, image_size=96,
        patch_size=8, num_labels=100,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config), classify, _images(8, 96, 100)


def resnet() -> Case:
    """A residual network: convolutions and BatchNorm, large activations first and many weights at the end."""
    config = transformers.ResNetConfig(
        embedding_size=32, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic", num_labels=100
    )
    return transformers.ResNetForImageClassification(config), classify, _images(16, 64, 100)


def t5() -> Case:
    """Encoder and decoder: the encoder's output is read by every layer of the decoder, several stages away."""
    config = transformers.T5Config(
        vocab_size=1024, d_model=256, d_kv=32, d_ff=1024, num_layers=4, num_decoder_layers=4, num_heads=8,
        pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return model(input_ids=batch["x"], labels=batch["y"]).loss  # type: ignore[no-any-return]

    return transformers.T5ForConditionalGeneration(config), step, _text(8, 96, 1024)


def llama() -> Case:
    """A decoder with rotary positions, grouped queries and gated layers, its head untied."""
    config = transformers.LlamaConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=256, use_cache=False, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config), next_token, _text(8, 192, 2048)


MODELS: dict[str, Callable[[], Case]] = {
    "GPT-2": gpt2, "BERT": bert, "ViT": vit, "ResNet": resnet, "T5": t5, "Llama": llama,
}  # fmt: skip
"""By name."""
