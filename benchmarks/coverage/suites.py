"""The suites of models, as functions: name of a model → what builds it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torchvision
from attrs import field, frozen
from torch import Tensor, nn
from torch.nn import functional as F

ROWS = 8
"""Samples in each batch."""


@frozen
class Case:
    """A model with its training step.

    Args:
        model: with random weights, in training mode.
        step: ``step(model, batch)``, as its own training script computes the loss.
        batch: of random values, in the shapes of real ones.
        options: for the second try, if the default call is refused: where the samples are, or one microbatch for a
            batch that is one sample. The reference has them, too.
    """

    model: nn.Module
    step: Callable[[Any, Any], Any]
    batch: Any
    options: dict[str, Any] = field(factory=lambda: {"batch_dims": 0})


Suite = dict[str, Callable[[], Case]]


def images(size: int = 64, channels: int = 3, rows: int = ROWS) -> Tensor:
    """Random images."""
    return torch.randn(rows, channels, size, size)


def classes(count: int, *shape: int) -> Tensor:
    """Random class numbers, one a sample if no shape is given."""
    return torch.randint(0, count, shape or (ROWS,))


CLASSIFIERS = {
    "googlenet": 64, "mobilenet_v3_small": 64, "efficientnet_v2_s": 64, "regnet_y_400mf": 64, "convnext_tiny": 64,
    "vit_b_16": 32, "swin_v2_t": 64, "maxvit_t": 224,
}  # fmt: skip
"""Name → size of its images."""
OPTIONS = {"googlenet": {"init_weights": True}, "vit_b_16": {"image_size": 32}}
DETECTORS = {
    "fasterrcnn_mobilenet_v3_large_320_fpn": {"min_size": 64, "max_size": 64},
    "retinanet_resnet50_fpn": {"min_size": 64, "max_size": 64},
    "fcos_resnet50_fpn": {"min_size": 64, "max_size": 64},
    "ssdlite320_mobilenet_v3_large": {},
}


def classifier_step(model: Any, batch: Any) -> Any:
    """As in references/classification: auxiliary heads count as they do there."""
    output = model(batch["image"])
    if isinstance(output, tuple):
        return sum((0.4**i) * F.cross_entropy(each, batch["label"]) for i, each in enumerate(output[:2]))
    return F.cross_entropy(output, batch["label"])


def classifier(make: Callable[[], Any], size: int) -> Case:
    """An image classifier."""
    return Case(make().train(), classifier_step, {"image": images(size), "label": classes(10)})


def segmentation_step(model: Any, batch: Any) -> Any:
    """As in references/segmentation."""
    output = model(batch["image"])
    loss = F.cross_entropy(output["out"], batch["mask"], ignore_index=255)
    return loss + 0.5 * F.cross_entropy(output["aux"], batch["mask"], ignore_index=255) if "aux" in output else loss


def segmentation(make: Callable[..., Any], **options: Any) -> Case:
    """A model of segmentation with an auxiliary head where there is one."""
    model = make(weights=None, weights_backbone=None, num_classes=5, **options).train()
    return Case(model, segmentation_step, {"image": images(64), "mask": classes(5, ROWS, 64, 64)})


def flow_step(model: Any, batch: Any) -> Any:
    """The sequence loss of references/optical_flow."""
    flows = model(batch["first"], batch["second"])
    return sum(0.8 ** (len(flows) - i - 1) * (flow - batch["flow"]).abs().mean() for i, flow in enumerate(flows))


def flow() -> Case:
    """RAFT, with two updates."""
    model = torchvision.models.optical_flow.raft_small(weights=None).train()
    batch = {"first": images(128, rows=4), "second": images(128, rows=4), "flow": images(128, 2, rows=4)}
    return Case(model, flow_step, batch)


def detection_step(model: Any, batch: Any) -> Any:
    """As in references/detection: the model returns its losses."""
    return sum(model(batch["images"], batch["targets"]).values())


def detection(make: Callable[..., Any], **options: Any) -> Case:
    """A detector, with two boxes an image."""
    model = make(weights=None, weights_backbone=None, num_classes=5, **options).train()
    corners = torch.rand(ROWS, 2, 2) * 30
    targets = [{"boxes": torch.cat([each, each + 20], 1), "labels": torch.tensor([1, 2])} for each in corners]
    batch = {"images": list(torch.rand(ROWS, 3, 64, 64)), "targets": targets}
    return Case(model, detection_step, batch, {"batch_dims": {"images": "samples", "targets": "samples"}})


def torchvision_models() -> Suite:
    """Models that TorchBench has not: classification, segmentation, video, optical flow and detection."""
    models, segment = torchvision.models, torchvision.models.segmentation
    found: Suite = {
        name: partial(classifier, partial(getattr(models, name), weights=None, num_classes=10, **OPTIONS.get(name,
        {})), size)
        for name, size in CLASSIFIERS.items()
    }  # fmt: skip
    found["deeplabv3_mobilenet_v3_large"] = partial(segmentation, segment.deeplabv3_mobilenet_v3_large, aux_loss=True)
    found["lraspp_mobilenet_v3_large"] = partial(segmentation, segment.lraspp_mobilenet_v3_large)
    found["r3d_18"] = lambda: Case(
        models.video.r3d_18(weights=None, num_classes=10).train(), classifier_step,
        {"image": torch.randn(ROWS, 3, 4, 32, 32), "label": classes(10)},
    )  # fmt: skip
    found["raft_small"] = flow
    for name, options in DETECTORS.items():
        found[name] = partial(detection, getattr(models.detection, name), **options)
    return found


RESIZED = (
    "beit_base_patch16_224", "cait_xxs24_224", "coatnet_0_rw_224", "deit3_small_patch16_224", "eva02_tiny_patch14_224",
    "gmlp_s16_224", "levit_128s", "mixer_s32_224", "swinv2_cr_tiny_224", "visformer_tiny",
)  # fmt: skip
"""Made for the size of their images."""
OTHERS = (
    "convnextv2_atto", "edgenext_xx_small", "fastvit_t8", "mobilevit_s", "poolformer_s12", "repvgg_a0",
    "res2net50_26w_4s", "skresnet18", "tiny_vit_5m_224", "xcit_nano_12_p16_224",
)  # fmt: skip
WITHOUT_DROP_PATH = ("dla34", "dpn68", "ghostnet_100", "hrnet_w18_small")


def timm_classifier(name: str, size: int = 32, **options: Any) -> Case:
    """A classifier, with dropout."""
    import timm

    model = timm.create_model(name, pretrained=False, num_classes=10, drop_rate=0.1, **options)
    return Case(model.train(), classifier_step, {"image": images(size), "label": classes(10)})


def timm_models() -> Suite:
    """Image classifiers, one of each family, with cross-entropy on small images."""
    found: Suite = {name: partial(timm_classifier, name, img_size=32, drop_path_rate=0.1) for name in RESIZED}
    found |= {name: partial(timm_classifier, name, 64, drop_path_rate=0.1) for name in OTHERS}
    found["efficientformer_l1"] = partial(timm_classifier, "efficientformer_l1", 224, drop_path_rate=0.1)
    return found | {name: partial(timm_classifier, name, 64) for name in WITHOUT_DROP_PATH}


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
        "is_decoder": False, "feed_forward_size": 64, "axial_pos_shape": (4, 16), "axial_pos_embds_dim": (8, 24),
        "num_buckets": 4, "lsh_attn_chunk_length": 16, "local_attn_chunk_length": 16, "max_position_embeddings": 64,
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
        logits = outputs.image_embeds @ outputs.text_embeds.T / 0.07
        labels = torch.arange(len(logits))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2

    return Case(model, step, batch)


def torchbench() -> Suite:
    """Models of TorchBench (github.com/pytorch/benchmark, ``torchbenchmark/models``) in small sizes.

    They are those whose code is in packages, of the 49 that Pfeife's paper counts, as its ``coverage_test.sh`` lists
    them (github.com/MerHS/pfeife): the models that it tries, and those that it comments out with a failure of its own
    as the reason.
    """
    models = torchvision.models
    found: Suite = {
        name: partial(classifier, partial(getattr(models, name), weights=None, num_classes=10), 64) for name in VISION
    }
    for name, (of, options) in TIMM.items():
        found[name] = partial(timm_classifier, of, options.get("img_size", 64), **options)
    found |= {name: partial(text, *entry) for name, entry in TEXTS.items()}
    return found | {"hf_Whisper": whisper, "hf_clip": clip}


SUITES: dict[str, Callable[[], Suite]] = {
    "torchbench": torchbench, "timm_models": timm_models, "torchvision_models": torchvision_models
}  # fmt: skip
