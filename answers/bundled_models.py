"""Models of transformers' classes, without weights: bundled ones by name, others by their ``config.json``.

Nothing is downloaded, and no memory is allocated for weights: parameters are on the meta device. torch is imported only
to create a model, so that a mistyped name is refused at once.
"""

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from ..core.errors import RequestError
from ..core.files.json_reader import parse_json
from ..core.files.read import read_text
from ..core.wording import nearest

if TYPE_CHECKING:
    from torch import nn

    Made = tuple[nn.Module, Callable[[nn.Module, Any], Any], Any]


@frozen
class Bundled:
    """A bundled model.

    Args:
        classes: names of the configuration class and of the model class in transformers; None for those of a
            configuration's ``model_type``.
        config: arguments of the configuration, as published.
        sequence: tokens of a sample in the published training; None for a model without tokens.
        dtype: of the parameters, as published: a dtype's name in ``torch``.
        source: the source of the numbers.
    """

    classes: tuple[str, str] | None
    config: dict[str, Any]
    sequence: int | None
    dtype: str
    source: str


def _gpt2(layers: int, heads: int, hidden: int, **others: Any) -> Bundled:
    config = {"n_layer": layers, "n_head": heads, "n_embd": hidden, "use_cache": False, **others}
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
    "gpt3-175b": evolve(
        _gpt2(96, 96, 12288, n_positions=2048), sequence=2048, dtype="bfloat16",
        source="GPT-3, arXiv 2005.14165, table 2.1"
    ),
    "llama-3-405b": evolve(
        _llama(
            126, 128, 8, 16384, 53248, vocab_size=128256, max_position_embeddings=8192, rope_theta=500000.0
        ),
        sequence=8192, source="Llama 3, arXiv 2407.21783, table 3",
    ),
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


def is_bundled(name: str) -> bool:
    """Whether a name is that of a bundled model, or of the ``config.json`` of a language model of transformers."""
    return name in BUNDLED or name.endswith(".json")


def bundled_model(name: str) -> Bundled:
    """The bundled model of that name, or what a ``config.json`` describes.

    Raises:
        RequestError: the file cannot be read, or names no ``model_type``.
    """
    if name in BUNDLED:
        return BUNDLED[name]
    config = parse_json(read_text(name), name)
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise RequestError(f"{name} has no model_type: give the config.json of a model of transformers")
    length = next((config[key] for key in ("max_position_embeddings", "n_positions") if key in config), 2048)
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if dtype not in ("bfloat16", "float16", "float32") or not isinstance(length, int):
        raise RequestError(f"{name} has the dtype {dtype!r} and {length!r} positions: give bfloat16, and a number")
    return Bundled(None, {**config, "use_cache": False}, length, dtype, name)


def check_model_name(name: str, *, bundled: bool = True) -> None:
    """Refuse a name that no model has, without importing torch or the model's module.

    Raises:
        RequestError: it is neither bundled nor written ``module:factory``, or no such module is found.
    """
    module, colon, attribute = name.partition(":")
    if bundled and is_bundled(name):
        if name not in BUNDLED:
            bundled_model(name)
        return
    if not (module and colon and attribute):
        factory = "write module:factory, such as mytraining:make, whose function returns (model, step, example_batch)"
        if bundled:
            factory = (
                f"{nearest(name, BUNDLED, 'panpipe catalog --models')}; or {factory}, or the path of a model's "
                "config.json; panpipe catalog --models lists the bundled ones"
            )
        raise RequestError(f"'{name}' is not a model: {factory}")
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


def shared_sizes(name: str) -> dict[str, int]:
    """The sizes of a bundled model that tensor ranks share: each rank has the same part of each."""
    config = bundled_model(name).config
    heads = config.get("num_attention_heads", config.get("n_head", 0))
    inner = config.get("intermediate_size") or config.get("n_inner") or 4 * config.get("n_embd", 0)
    groups = config.get("num_key_value_heads", heads)
    return {"attention heads": heads, "groups of keys and values": groups, "features inside the MLP": inner}


def make(
    name: str, batch: int, sequence: int | None = None, tensor: int = 1, *, by_tokens: bool = False, experts: int = 1
) -> "Made":
    """Model on meta, step and example batch.

    Args:
        sequence: tokens of a sample; as published if None.
        tensor: number of tensor ranks that share the model; above 1 the result is the part of one (`tensor_ranks`).
        by_tokens: whether tensor ranks also share the tokens between their layers (sequence parallelism).
        experts: number of expert ranks of a mixture model, each with ``batch`` samples.

    Raises:
        RequestError: transformers is missing, the model takes no such sequence, or the ranks cannot share it.
    """
    bundled = bundled_model(name)
    if sequence is not None and bundled.sequence is None:
        raise RequestError(f"'{name}' takes images and no sequence of {sequence} tokens: leave --sequence out")
    try:
        import transformers
    except ImportError:
        raise RequestError(
            f"'{name}' needs classes of transformers, which is not installed: pip install 'panpipe[examples]'"
        ) from None
    length = sequence or bundled.sequence or 0
    model = _constructed(name, bundled, length, transformers)
    step, example = _images(batch) if bundled.sequence is None else _tokens(batch, length)
    from .tensor_ranks import check_tensor_ranks, model_of_rank, share_experts

    share_experts(name, model, experts)
    if tensor > 1:
        check_tensor_ranks(name, model, shared_sizes(name), tensor)
        model, step = model_of_rank(model, tensor, tokens=length if by_tokens else None)
    return model, step, example


def _constructed(name: str, bundled: Bundled, length: int, transformers: Any) -> "nn.Module":
    """The model on the meta device, with positions for this many tokens."""
    import torch

    try:
        if bundled.classes is None:
            others = {key: value for key, value in bundled.config.items() if key != "model_type"}
            config = transformers.AutoConfig.for_model(bundled.config["model_type"], **others)
            maps = (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
                    transformers.MODEL_FOR_MASKED_LM_MAPPING)  # fmt: skip
            kind = next((known[type(config)] for known in maps if type(config) in known), None)
            if kind is None:
                raise RequestError(f"transformers has no language model of model_type '{config.model_type}' ({name})")
        else:
            config = getattr(transformers, bundled.classes[0])(**bundled.config)
            kind = getattr(transformers, bundled.classes[1])
        for limit in ("max_position_embeddings", "n_positions"):
            if bundled.sequence is not None and hasattr(config, limit):
                setattr(config, limit, max(length, getattr(config, limit)))
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = 0  # which token it is costs nothing
        if config._attn_implementation != "eager":
            config._attn_implementation = _attention(transformers)
        with torch.device("meta"):
            try:
                made = kind(config)
            except ValueError:  # attention with other scores, such as Gemma 2's
                config._attn_implementation = "eager"
                made = kind(config)
            model: nn.Module = made.to(getattr(torch, bundled.dtype)).train()
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        if name in BUNDLED:
            raise
        raise RequestError(f"transformers cannot construct {name}: {type(error).__name__}: {error}") from None
    if getattr(model, "loss_type", None) is None:  # transformers did not derive it from the class's name
        model.loss_type = "ForCausalLM"  # type: ignore[assignment]
    return model


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
