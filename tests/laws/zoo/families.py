"""More families of transformers and diffusers, one model each: language, speech, vision, and denoisers."""

from collections.abc import Callable
from typing import Any

import diffusers
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from .entry import Entry, classes, generator, images, tokens
from .language import LENGTH, VOCABULARY, Batch, own_loss, padded_text, text

ENCODER = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
VISION = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
SEQ2SEQ = {
    "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "use_cache": False,
}  # fmt: skip


def _model(name: str, model: str, config: str, batch: Callable[[int], Batch], shows: str = "", float64: bool = True,
           **options: Any) -> Entry:  # fmt: skip
    """A model of transformers that computes its own loss, by the names of its class and its config class."""

    def make() -> nn.Module:
        return getattr(transformers, model)(getattr(transformers, config)(**options))

    return Entry(name, "transformers", make, own_loss, batch, shows, float64)


def labelled_images(rows: int) -> Batch:
    return {"pixel_values": images(rows, 32), "labels": classes(rows, 3)}


def videos(rows: int) -> Batch:
    frames = torch.randn(rows, 4, 3, 16, 16, generator=generator())
    return {"pixel_values": frames, "labels": classes(rows, 3)}


def captioned(rows: int) -> Batch:
    return {"input_ids": tokens(rows, LENGTH, VOCABULARY), "pixel_values": images(rows, 16)}


def transcribed(rows: int) -> Batch:
    return {"input_values": torch.randn(rows, 400, generator=generator()), "labels": tokens(rows, 5, 20)}


def translated(rows: int) -> Batch:
    return {**padded_text(rows), "labels": tokens(rows, LENGTH - 3, VOCABULARY)}


def siglip() -> nn.Module:
    text_config = {**VISION, "vocab_size": VOCABULARY, "max_position_embeddings": 32}
    vision_config = {**VISION, "image_size": 16, "patch_size": 8}
    return transformers.SiglipModel(transformers.SiglipConfig(text_config=text_config, vision_config=vision_config))


def pair_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch, return_loss=True).loss


def denoised(*shape: int, text_shape: tuple[int, int] = (5, 16), times: str = "integers") -> Callable[[int], Batch]:
    """Latents, their noise, the states of a text encoder, and a time for each row."""

    def batch(rows: int) -> Batch:
        draw = generator()
        made = {name: torch.randn(rows, *shape, generator=draw) for name in ("latents", "noise")}
        made["text"] = torch.randn(rows, *text_shape, generator=draw)
        share = torch.rand(rows, generator=draw)
        return {**made, "time": (1000 * share).long() if times == "integers" else share}

    return batch


def predict_noise(model: nn.Module, batch: Batch) -> Tensor:
    found = model(batch["latents"], batch["text"], batch["time"]).sample
    return F.mse_loss(found, batch["noise"])


def predict_noise_at_time(model: nn.Module, batch: Batch) -> Tensor:
    found = model(batch["latents"], batch["time"], batch["text"]).sample
    return F.mse_loss(found, batch["noise"])


def quantized(model: Any, batch: Batch) -> Tensor:
    """A VQ-VAE's reconstruction and commitment."""
    codes, commitment, _ = model.quantize(model.encode(batch["pixel_values"]).latents)
    return F.mse_loss(model.decoder(model.post_quant_conv(codes)), batch["pixel_values"]) + commitment


def autoencoder() -> nn.Module:
    return diffusers.VQModel(
        block_out_channels=(8, 16), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, norm_num_groups=4, num_vq_embeddings=16,
    )  # fmt: skip


def video_transformer() -> nn.Module:
    return diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=16, ffn_dim=32, num_layers=1, cross_attn_norm=True, rope_max_seq_len=32,
    )  # fmt: skip


def video_unet() -> nn.Module:
    return diffusers.UNet3DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"), block_out_channels=(8, 16), layers_per_block=1,
        norm_num_groups=4, cross_attention_dim=16, attention_head_dim=4,
    )  # fmt: skip


def linear_transformer() -> nn.Module:
    return diffusers.SanaTransformer2DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, num_layers=2,
        num_cross_attention_heads=2, cross_attention_head_dim=8, cross_attention_dim=16, caption_channels=16,
        mlp_ratio=2, sample_size=8, patch_size=1,
    )  # fmt: skip


def flow() -> nn.Module:
    return diffusers.AuraFlowTransformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=16, caption_projection_dim=16, out_channels=4, pos_embed_max_size=16,
    )  # fmt: skip


def prior() -> nn.Module:
    return diffusers.PriorTransformer(
        num_attention_heads=2, attention_head_dim=8, num_layers=2, embedding_dim=16, num_embeddings=5,
        additional_embeddings=4,
    )  # fmt: skip


def predict_embedding(model: nn.Module, batch: Batch) -> Tensor:
    found = model(batch["latents"], batch["time"], batch["noise"], batch["text"]).predicted_image_embedding
    return F.mse_loss(found, batch["noise"])


FAMILIES: tuple[Entry, ...] = (
    _model("GPT-Neo", "GPTNeoForCausalLM", "GPTNeoConfig", padded_text, "local attention, in float32 in any dtype",
           False, vocab_size=VOCABULARY, hidden_size=16, num_layers=2, num_heads=2,
           attention_types=[[["global", "local"], 1]], max_position_embeddings=32, window_size=4, use_cache=False),
    _model("CTRL", "CTRLLMHeadModel", "CTRLConfig", text, vocab_size=VOCABULARY, n_positions=32, n_embd=16, dff=32,
           n_layer=2, n_head=2, use_cache=False),
    _model("OLMoE", "OlmoeForCausalLM", "OlmoeConfig", text, "experts", False, **ENCODER, num_key_value_heads=2,
           num_experts=4, num_experts_per_tok=2, use_cache=False),
    _model("XLM", "XLMWithLMHeadModel", "XLMConfig", text, "assertions about lengths", vocab_size=VOCABULARY,
           emb_dim=16, n_layers=2, n_heads=2, max_position_embeddings=32),
    _model("FNet", "FNetForMaskedLM", "FNetConfig", text, "Fourier transforms in place of attention",
           **{key: value for key, value in ENCODER.items() if key != "num_attention_heads"}),
    _model("RoFormer", "RoFormerForMaskedLM", "RoFormerConfig", padded_text, **ENCODER, embedding_size=16),
    _model("SqueezeBERT", "SqueezeBertForMaskedLM", "SqueezeBertConfig", padded_text, "grouped convolutions",
           **ENCODER, embedding_size=16),
    _model("MPNet", "MPNetForMaskedLM", "MPNetConfig", padded_text, **{**ENCODER, "pad_token_id": 1}),
    _model("mBART", "MBartForConditionalGeneration", "MBartConfig", translated, **SEQ2SEQ),
    _model("Wav2Vec2, CTC", "Wav2Vec2ForCTC", "Wav2Vec2Config", transcribed, "a loss that reads lengths", **VISION,
           conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2, vocab_size=20,
           num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, mask_time_prob=0.0, layerdrop=0.0,
           pad_token_id=0),
    _model("PVT", "PvtForImageClassification", "PvtConfig", labelled_images, image_size=32, num_encoder_blocks=2,
           depths=[1, 1], sequence_reduction_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[4, 2], strides=[4, 2],
           num_attention_heads=[1, 2], mlp_ratios=[2, 2], num_labels=3),
    _model("ConvNeXt V2", "ConvNextV2ForImageClassification", "ConvNextV2Config", labelled_images,
           hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=3),
    _model("Hiera", "HieraForImageClassification", "HieraConfig", labelled_images, "pooled queries",
           image_size=[32, 32], patch_size=[7, 7], patch_stride=[4, 4], patch_padding=[3, 3], embed_dim=8,
           depths=[1, 1, 1], num_heads=[1, 2, 2], masked_unit_size=[4, 4], query_stride=[2, 2], num_query_pool=2,
           num_labels=3),
    _model("ViT-MAE", "ViTMAEForPreTraining", "ViTMAEConfig", lambda rows: {"pixel_values": images(rows, 32)},
           "a random mask in the model", **VISION, image_size=32, patch_size=8, decoder_hidden_size=16,
           decoder_num_hidden_layers=1, decoder_num_attention_heads=2, decoder_intermediate_size=32),
    _model("VideoMAE", "VideoMAEForVideoClassification", "VideoMAEConfig", videos, "video", **VISION, image_size=16,
           patch_size=8, num_frames=4, tubelet_size=2, num_labels=3),
    Entry("SigLIP", "transformers", siglip, pair_loss, captioned, "two towers, a sigmoid loss over all pairs of rows"),
    Entry("VQModel", "diffusers", autoencoder, quantized, lambda rows: {"pixel_values": images(rows, 16)},
          "a codebook, methods other than forward"),
    Entry("Prior", "diffusers", prior, predict_embedding, denoised(16), "tokens of several kinds"),
    Entry("AuraFlow", "diffusers", flow, predict_noise, denoised(4, 8, 8, times="shares"), "two streams, then one"),
    Entry("Wan", "diffusers", video_transformer, predict_noise_at_time, denoised(4, 2, 8, 8), "video"),
    Entry("UNet3D", "diffusers", video_unet, predict_noise_at_time, denoised(4, 2, 8, 8),
          "convolutions over time, transposed layouts"),
    Entry("Sana", "diffusers", linear_transformer, predict_noise, denoised(4, 8, 8),
          "linear attention, depthwise convolutions of transposed sequences"),
)  # fmt: skip
