"""Models of TorchBench (github.com/pytorch/benchmark, ``torchbenchmark/models``) in small sizes.

They are those whose code is in packages, of the 49 that Pfeife's paper counts, as its ``coverage_test.sh`` lists them
(github.com/MerHS/pfeife): the models that it tries, and those that it comments out with a failure of its own as the
reason.
"""

from functools import partial
from typing import Any

import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from benchmarks.coverage.case import ROWS, Case, Suite, classes, images
from benchmarks.coverage.timm_models import classifier as timm_classifier
from benchmarks.coverage.torchvision_models import classifier

VISION = (
    "alexnet", "densenet121", "mnasnet1_0", "mobilenet_v2", "mobilenet_v3_large", "resnet152", "resnet18", "resnet50",
    "resnext50_32x4d", "shufflenet_v2_x1_0", "squeezenet1_1", "vgg16",
)  # fmt: skip
TIMM: dict[str, tuple[str, dict[str, Any]]] = {
    "timm_efficientnet": ("efficientnet_b0", {}),
    "timm_nfnet": ("dm_nfnet_f0", {}),
    "timm_regnet": ("regnety_120", {}),
    "timm_resnest": ("resnest14d", {}),
    "timm_vision_transformer": ("vit_small_patch16_224", {"img_size": 32}),
    "timm_vision_transformer_large": (
        "vit_giant_patch14_224", {"img_size": 28, "embed_dim": 64, "num_heads": 4, "mlp_ratio": 48 / 11},
    ),
    "timm_vovnet": ("vovnet39a", {}),
}  # fmt: skip
VOCABULARY, LENGTH = 100, 16
BERT = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "decoder_start_token_id": 0}
WHISPER = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_source_positions": 32, "num_labels": 4,
}  # fmt: skip
TEXTS: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "hf_Albert": ("AlbertConfig", "AlbertForMaskedLM", {**BERT, "embedding_size": 16}, LENGTH),
    "hf_Bart": ("BartConfig", "BartForConditionalGeneration", {
        "vocab_size": VOCABULARY, "d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_layers": 6, "decoder_layers": 6,
    }, LENGTH),
    "hf_Bert": ("BertConfig", "BertForMaskedLM", BERT, LENGTH),
    "hf_Bert_large": ("BertConfig", "BertForMaskedLM", {**BERT, "num_hidden_layers": 24}, LENGTH),
    "hf_BigBird": ("BigBirdConfig", "BigBirdForMaskedLM", {
        **BERT, "num_hidden_layers": 4, "attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1,
    }, 64),
    "hf_DistilBert": ("DistilBertConfig", "DistilBertForMaskedLM", {
        "vocab_size": VOCABULARY, "dim": 32, "n_heads": 4, "hidden_dim": 64,
    }, LENGTH),
    "hf_GPT2": ("GPT2Config", "GPT2LMHeadModel", {"vocab_size": VOCABULARY, "n_embd": 32, "n_head": 4}, LENGTH),
    "hf_GPT2_large": ("GPT2Config", "GPT2LMHeadModel", {
        "vocab_size": VOCABULARY, "n_embd": 32, "n_head": 4, "n_layer": 36,
    }, LENGTH),
    "hf_Longformer": ("LongformerConfig", "LongformerForMaskedLM", {
        **BERT, "num_hidden_layers": 4, "attention_window": 8, "max_position_embeddings": 64,
    }, 32),
    "hf_Reformer": ("ReformerConfig", "ReformerForMaskedLM", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 2, "attention_head_size": 16,
        "is_decoder": False,
        "feed_forward_size": 64, "axial_pos_shape": (4, 16), "axial_pos_embds_dim": (8, 24), "num_buckets": 4,
        "lsh_attn_chunk_length": 16, "local_attn_chunk_length": 16, "max_position_embeddings": 64,
    }, 64),
    "hf_Roberta_base": ("XLMRobertaConfig", "XLMRobertaForMaskedLM", BERT, LENGTH),
    "hf_T5": ("T5Config", "T5ForConditionalGeneration", {**T5, "num_layers": 6}, LENGTH),
    "hf_T5_generate": ("T5Config", "T5ForConditionalGeneration", {**T5, "num_layers": 6}, LENGTH),
    "hf_T5_base": ("T5Config", "T5ForConditionalGeneration", {**T5, "num_layers": 12}, LENGTH),
    "hf_T5_large": ("T5Config", "T5ForConditionalGeneration", {**T5, "num_layers": 24}, LENGTH),
}  # fmt: skip
"""Name → configuration and class of transformers, values of the configuration, tokens in a row."""


def own_loss(model: nn.Module, batch: Any) -> Any:
    """The loss that a model of transformers returns."""
    return model(**batch).loss


def text(config: str, kind: str, values: dict[str, Any], length: int) -> Case:
    """A language model."""
    import transformers

    model = getattr(transformers, kind)(getattr(transformers, config)(**values)).train()
    tokens = torch.randint(3, VOCABULARY, (ROWS, length))
    return Case(model, own_loss, {"input_ids": tokens, "labels": tokens.clone()})


def whisper() -> Case:
    """Whisper that classifies audio."""
    from transformers import WhisperConfig, WhisperForAudioClassification

    model = WhisperForAudioClassification(WhisperConfig(**WHISPER)).train()
    return Case(model, own_loss, {"input_features": torch.randn(ROWS, 80, 64), "labels": classes(4)})


def contrast(images_of: torch.Tensor, texts: torch.Tensor, temperature: float = 0.07) -> torch.Tensor:
    """The contrastive loss of hf_clip."""
    logits = images_of @ texts.T / temperature
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def clip() -> Case:
    """CLIP with a contrastive loss."""
    from transformers import CLIPConfig, CLIPModel

    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    text_of = {**tower, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "eos_token_id": 2}
    vision = {**tower, "image_size": 32, "patch_size": 8}
    model = CLIPModel(CLIPConfig(text_config=text_of, vision_config=vision, projection_dim=16)).train()
    tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
    tokens[:, -1] = 2
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "pixel_values": images(32)}

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        outputs = model(**batch)
        return contrast(outputs.image_embeds, outputs.text_embeds)

    return Case(model, step, batch)


def suite() -> Suite:
    """The models."""
    models = torchvision.models
    found: Suite = {
        name: partial(classifier, partial(getattr(models, name), weights=None, num_classes=10), 64) for name in VISION
    }
    found |= {name: partial(timm_classifier, of, 64, **options) for name, (of, options) in TIMM.items()}
    for name in ("timm_vision_transformer", "timm_vision_transformer_large"):
        of, options = TIMM[name]
        found[name] = partial(timm_classifier, of, options["img_size"], **options)
    found |= {name: partial(text, *entry) for name, entry in TEXTS.items()}
    return found | {"hf_Whisper": whisper, "hf_clip": clip}
