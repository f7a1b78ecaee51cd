"""Models of TorchBench (github.com/pytorch/benchmark, ``torchbenchmark/models``) in small sizes."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn
from torch.ao.quantization import get_default_qat_qconfig_mapping, quantize_fx
from torch.nn import functional as F

from benchmarks.coverage.case import ROWS, Case, Suite, classes, images
from benchmarks.coverage.timm_models import classifier as timm_classifier
from benchmarks.coverage.torchbench_programs import programs
from benchmarks.coverage.torchvision_models import classifier, detection

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
LLAMA = {**BERT, "num_key_value_heads": 4}
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
    "llama_v2_7b_16h": ("LlamaConfig", "LlamaForCausalLM", {**LLAMA, "num_hidden_layers": 16}, LENGTH),
    "moondream": ("PhiConfig", "PhiForCausalLM", {**LLAMA, "num_hidden_layers": 24}, LENGTH),
}  # fmt: skip
"""Name → configuration and class of transformers, values of the configuration, tokens in a row."""
DETECTRON2 = (
    "detectron2_fasterrcnn_r_101_c4", "detectron2_fasterrcnn_r_101_dc5", "detectron2_fasterrcnn_r_101_fpn",
    "detectron2_fasterrcnn_r_50_c4", "detectron2_fasterrcnn_r_50_dc5", "detectron2_fasterrcnn_r_50_fpn",
    "detectron2_fcos_r_50_fpn", "detectron2_maskrcnn", "detectron2_maskrcnn_r_101_c4",
    "detectron2_maskrcnn_r_101_fpn", "detectron2_maskrcnn_r_50_c4", "detectron2_maskrcnn_r_50_fpn",
)  # fmt: skip
OWN_STEPS = (
    "Background_Matting", "basic_gnn_edgecnn", "basic_gnn_gcn", "basic_gnn_gin", "basic_gnn_sage", "demucs", "dlrm",
    "doctr_det_predictor", "doctr_reco_predictor", "drq", "functorch_maml_omniglot", "maml", "maml_omniglot", "moco",
    "nvidia_deeprecommender", "opacus_cifar10", "pytorch_CycleGAN_and_pix2pix", "pytorch_stargan", "sam",
    "soft_actor_critic", "speech_transformer", "tacotron2", "timm_efficientdet", "tts_angular", "yolov3",
)  # fmt: skip
NOT_TRAINED = {
    **dict.fromkeys(OWN_STEPS, "recorded with 17bacc50, whose benchmark has its step; not one of Pfeife's"),
    **dict.fromkeys(DETECTRON2, "detectron2 is no package of the registry"),
    "fastNLP_Bert": "fastNLP 0.6 does not run with current releases of Python and numpy",
    "microbench_unbacked_tolist_sum": "one parameter, no training",
    "modded_nanogpt": "needs CUDA (FlexAttention)",
    "pyhpc_equation_of_state": "no parameters",
    "pyhpc_isoneutral_mixing": "no parameters",
    "pyhpc_turbulent_kinetic_energy": "no parameters",
    "sam_fast": "inference with kernels for CUDA; its model is sam",
    "simple_gpt": "inference with CUDA",
    "simple_gpt_tp_manual": "inference with CUDA over several ranks",
}  # fmt: skip
"""The models of TorchBench that are not here, and why."""


PFEIFE = (
    "alexnet", "BERT_pytorch", "cm3leon_generate", "dcgan", "densenet121", "functorch_dp_cifar10", "hf_Albert",
    "hf_Bart", "hf_Bert",
    "hf_Bert_large", "hf_BigBird", "hf_clip", "hf_DistilBert", "hf_GPT2", "hf_GPT2_large", "hf_Longformer",
    "hf_Reformer",
    "hf_Roberta_base", "hf_T5", "hf_T5_base", "hf_T5_generate", "hf_T5_large", "hf_Whisper", "LearningToPaint",
    "lennard_jones",
    "llama", "mnasnet1_0", "mobilenet_v2", "mobilenet_v3_large", "nanogpt", "phlippe_densenet", "phlippe_resnet",
    "pytorch_unet", "resnet152", "resnet18", "resnet50", "resnext50_32x4d", "shufflenet_v2_x1_0", "squeezenet1_1",
    "Super_SloMo", "timm_efficientnet", "timm_nfnet", "timm_regnet", "timm_resnest", "timm_vision_transformer",
    "timm_vision_transformer_large", "timm_vovnet", "torch_multimodal_clip", "vgg16",
)  # fmt: skip
"""The 49 that Pfeife's paper counts, as its ``coverage_test.sh`` lists them (github.com/MerHS/pfeife): the models that
it tries, and those that it comments out with a failure of its own as the reason."""


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


def distil_whisper() -> Case:
    """Whisper that writes text."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, **WHISPER
    )
    batch = {"input_features": torch.randn(ROWS, 80, 64), "labels": torch.randint(3, VOCABULARY, (ROWS, LENGTH))}
    return Case(WhisperForConditionalGeneration(config).train(), own_loss, batch)


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


def llava() -> Case:
    """LLaVA with one image in each row."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, image_size=32, patch_size=8
    )
    language = LlamaConfig(**LLAMA, num_hidden_layers=4)
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=language, image_token_index=VOCABULARY - 1)
    ).train()
    tokens = torch.randint(3, VOCABULARY - 1, (ROWS, 2 * LENGTH))
    tokens[:, :16] = VOCABULARY - 1
    batch = {"input_ids": tokens, "labels": tokens.clone(), "pixel_values": images(32)}
    return Case(model, own_loss, batch)


def text_encoder() -> Case:
    """The text encoder of Stable Diffusion 2, towards given hidden states."""
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=12, num_attention_heads=4,
        max_position_embeddings=LENGTH, eos_token_id=2, hidden_act="gelu",
    )  # fmt: skip
    batch = {"tokens": torch.randint(3, VOCABULARY, (ROWS, LENGTH)), "wanted": torch.randn(ROWS, LENGTH, 32)}
    return Case(
        CLIPTextModel(config).train(), lambda m, b: F.mse_loss(m(b["tokens"]).last_hidden_state, b["wanted"]), batch
    )


def unet() -> Case:
    """The U-Net of Stable Diffusion 2 that predicts noise."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16, block_out_channels=(32, 64, 64, 64), attention_head_dim=(2, 4, 4, 4), cross_attention_dim=32,
        use_linear_projection=True,
    ).train()  # fmt: skip
    batch = {
        "noisy": images(16, 4), "noise": images(16, 4), "timesteps": torch.randint(0, 1000, (ROWS,)),
        "prompt": torch.randn(ROWS, 7, 32),
    }  # fmt: skip

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.mse_loss(model(batch["noisy"], batch["timesteps"], batch["prompt"]).sample, batch["noise"])

    return Case(model, step, batch)


def quantized(make: Callable[..., nn.Module]) -> Case:
    """Training that is aware of quantization."""
    model = make(weights=None, num_classes=10).train()
    model = quantize_fx.prepare_qat_fx(model, get_default_qat_qconfig_mapping("fbgemm"), (images(64, rows=2),))
    batch = {"image": images(64), "label": classes(10)}
    return Case(model.train(), lambda m, b: F.cross_entropy(m(b["image"]), b["label"]), batch)


def mask_rcnn() -> Case:
    """Mask R-CNN, with two objects an image."""
    case = detection(torchvision.models.detection.maskrcnn_resnet50_fpn, min_size=64, max_size=64)
    for target in case.batch["targets"]:
        target["masks"] = torch.zeros(2, 64, 64, dtype=torch.uint8)
        for mask, (left, top, right, bottom) in zip(target["masks"], target["boxes"].int().tolist(), strict=True):
            mask[top:bottom, left:right] = 1
    return case


def suite(sources: Path) -> Suite:
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
    found |= {
        "hf_Whisper": whisper, "hf_distil_whisper": distil_whisper, "hf_clip": clip, "llava": llava,
        "stable_diffusion_text_encoder": text_encoder, "stable_diffusion_unet": unet, "vision_maskrcnn": mask_rcnn,
        "mobilenet_v2_quantized_qat": partial(quantized, models.mobilenet_v2),
        "resnet50_quantized_qat": partial(quantized, models.resnet50),
    }  # fmt: skip
    return found | programs(sources / "benchmark")
