"""Bundled models, by name: published architectures, from transformers' classes, without weights.

Nothing is downloaded, and no memory is allocated for weights: parameters are on the meta device. torch is imported only
to create a model, so that a mistyped name is refused at once.
"""

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from attrs import frozen

from ..core.errors import RequestError
from ..core.nearest import nearest

if TYPE_CHECKING:
    from torch import nn

    Made = tuple[nn.Module, Callable[[nn.Module, Any], Any], Any]


@frozen
class Bundled:
    """A bundled model.

    Args:
        classes: names of the configuration class and of the model class in transformers.
        config: arguments of the configuration, as published.
        sequence: tokens of a sample in the published training; None for a model without tokens.
        dtype: of the parameters, as published: a dtype's name in ``torch``.
        source: the source of the numbers.
    """

    classes: tuple[str, str]
    config: dict[str, Any]
    sequence: int | None
    dtype: str
    source: str


def _gpt2(layers: int, heads: int, hidden: int) -> Bundled:
    config = {"n_layer": layers, "n_head": heads, "n_embd": hidden, "use_cache": False}
    return Bundled(("GPT2Config", "GPT2LMHeadModel"), config, 1024, "float32", "GPT-2 report, table 2")


def _llama(layers: int, heads: int, groups: int, hidden: int, inner: int, **others: Any) -> Bundled:
    config = {
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": groups,
        "hidden_size": hidden, "intermediate_size": inner, "vocab_size": 32000, "max_position_embeddings": 4096,
        "use_cache": False, "tie_word_embeddings": False, **others,
    }  # fmt: skip
    return Bundled(("LlamaConfig", "LlamaForCausalLM"), config, 4096, "bfloat16", "Llama 2, arXiv 2307.09288")


BUNDLED = {
    "gpt2": _gpt2(12, 12, 768),
    "gpt2-medium": _gpt2(24, 16, 1024),
    "gpt2-large": _gpt2(36, 20, 1280),
    "gpt2-xl": _gpt2(48, 25, 1600),
    "llama-7b": _llama(32, 32, 32, 4096, 11008),
    "llama-13b": _llama(40, 40, 40, 5120, 13824),
    "llama-70b": _llama(80, 64, 8, 8192, 28672),
    "bert-large": Bundled(
        ("BertConfig", "BertForMaskedLM"),
        {"num_hidden_layers": 24, "num_attention_heads": 16, "hidden_size": 1024, "intermediate_size": 4096},
        512, "float32", "BERT, arXiv 1810.04805, section 3",
    ),
    "vit-large": Bundled(
        ("ViTConfig", "ViTForImageClassification"),
        {"num_hidden_layers": 24, "num_attention_heads": 16, "hidden_size": 1024, "intermediate_size": 4096,
         "num_labels": 1000},
        None, "float32", "ViT-L/16, arXiv 2010.11929, table 1",
    ),
}  # fmt: skip
"""The bundled models by name."""

IMAGE = 224
"""Rows and columns of an image, for image models."""

_ATTENTION = "panpipe_sdpa"


def check_model_name(name: str, *, bundled: bool = True) -> None:
    """Refuse a name that no model has, without importing torch or the model's module.

    Args:
        name: as the command line has it.
        bundled: whether bundled models count.

    Raises:
        RequestError: it is neither bundled nor written ``module:factory``, or no such module is found.
    """
    module, colon, attribute = name.partition(":")
    if bundled and name in BUNDLED:
        return
    if not (module and colon and attribute):
        known = f"{nearest(name, BUNDLED)}; or " if bundled else ""
        raise RequestError(f"'{name}' is not a model: {known}write module:factory, such as examples.gpt2:make")
    here, top = os.getcwd(), module.partition(".")[0]
    sys.path.insert(0, here)
    try:
        found = top in sys.modules or find_spec(top) is not None
    except (ImportError, ValueError):
        found = False
    finally:
        sys.path.remove(here)
    if not found:
        raise RequestError(f"cannot import '{module}' for '{name}': there is no module '{top}'; run where it is found")


def make(name: str, batch: int, sequence: int | None = None) -> "Made":
    """Model on meta, step and example batch.

    Args:
        name: one of `BUNDLED`.
        batch: samples of a step.
        sequence: tokens of a sample; as published if None.

    Raises:
        RequestError: transformers is missing, or the model takes no such sequence.
    """
    bundled = BUNDLED[name]
    if batch < 1 or (sequence is not None and sequence < 2):
        raise RequestError(f"a batch of {batch} samples of {sequence} tokens: give at least 1 sample and 2 tokens")
    if sequence is not None and bundled.sequence is None:
        raise RequestError(f"'{name}' takes images and no sequence of {sequence} tokens: leave --sequence out")
    try:
        import transformers
    except ImportError:
        raise RequestError(
            f"'{name}' needs classes of transformers, which is not installed: pip install 'panpipe[examples]'"
        ) from None
    import torch

    length = sequence or bundled.sequence or 0
    config = getattr(transformers, bundled.classes[0])(**bundled.config)
    for limit in ("max_position_embeddings", "n_positions"):
        if bundled.sequence is not None and hasattr(config, limit):
            setattr(config, limit, max(length, getattr(config, limit)))
    config._attn_implementation = _attention(transformers)
    with torch.device("meta"):
        model = getattr(transformers, bundled.classes[1])(config).to(getattr(torch, bundled.dtype)).train()
    if getattr(model, "loss_type", None) is None:  # transformers did not derive it from the class's name
        model.loss_type = "ForCausalLM"
    return model, *(_images(batch) if bundled.sequence is None else _tokens(batch, length))


def _attention(transformers: Any) -> str:
    """Attention without a mask tensor.

    While it is traced, transformers creates a mask tensor that only expresses causality. Untraced it creates none, and
    fused kernels skip half of the computation.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    transformers.AttentionInterface.register(_ATTENTION, sdpa_attention_forward)
    return _ATTENTION


def _tokens(batch: int, length: int) -> "tuple[Callable[[nn.Module, Any], Any], Any]":
    import torch

    def step(model: "nn.Module", batch: Any) -> Any:
        return model(input_ids=batch["tokens"], labels=batch["tokens"]).loss

    return step, {"tokens": torch.zeros(batch, length, dtype=torch.int64)}


def _images(batch: int) -> "tuple[Callable[[nn.Module, Any], Any], Any]":
    import torch

    def step(model: "nn.Module", batch: Any) -> Any:
        return model(pixel_values=batch["images"], labels=batch["labels"]).loss

    images = torch.zeros(1, 3, IMAGE, IMAGE).expand(batch, -1, -1, -1)
    return step, {"images": images, "labels": torch.zeros(batch, dtype=torch.int64)}
