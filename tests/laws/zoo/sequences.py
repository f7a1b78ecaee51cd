"""Long sequences and time series from transformers: transposed layouts, late numbers, local attention."""

from typing import Any

import torch

from .entry import Entry, classes, generator, tokens
from .language import ENCODER, LENGTH, ROPE, VOCABULARY, Batch, _built, _causal, own_loss

CHANNELS, HORIZON = 2, 4
LONG = 16


def series(length: int) -> Any:
    """Past and future values of shape (rows, time, channels)."""

    def batch(rows: int) -> Batch:
        drawn = torch.randn(rows, length + HORIZON, CHANNELS, generator=generator())
        return {"past_values": drawn[:, :length].contiguous(), "future_values": drawn[:, length:].contiguous()}

    return batch


def dated(length: int) -> Any:
    """A series of one channel with features of the time, and which of its values were seen."""

    def batch(rows: int) -> Batch:
        drawn = torch.randn(rows, length + HORIZON, generator=generator())
        time = torch.linspace(0, 1, length + HORIZON)[None, :, None].repeat(rows, 1, 2)
        return {
            "past_values": drawn[:, :length].contiguous(),
            "past_time_features": time[:, :length].contiguous(),
            "past_observed_mask": (drawn[:, :length] > -1.5).float(),
            "future_values": drawn[:, length:].contiguous(),
            "future_time_features": time[:, length:].contiguous(),
        }

    return batch


def long_text(rows: int) -> Batch:
    """Padded text of a length that is no multiple of an attention window, and a class for each row."""
    ids = tokens(rows, LONG - 3, VOCABULARY)
    mask = torch.ones_like(ids)
    mask[::2, -4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": classes(rows, 3)}


def long_translation(rows: int) -> Batch:
    """A source with a mask, and a target."""
    source = long_text(rows)
    return {**source, "labels": tokens(rows, LENGTH - 3, VOCABULARY)}


def attended_translation(rows: int) -> Batch:
    """A translation whose first source token attends to all others, as LED wants it."""
    batch = long_translation(rows)
    everywhere = torch.zeros_like(batch["input_ids"])
    everywhere[:, 0] = 1
    return {**batch, "global_attention_mask": everywhere}


def plain_translation(rows: int) -> Batch:
    """A source without a mask, with which ProphetNet returns no number in float64, and a target."""
    return {"input_ids": tokens(rows, LENGTH, VOCABULARY), "labels": tokens(rows, LENGTH - 3, VOCABULARY)}


PATCHED = {
    "num_input_channels": CHANNELS, "context_length": 16, "patch_length": 4, "patch_stride": 4, "d_model": 16,
    "prediction_length": HORIZON,
}  # fmt: skip
DATED = {
    "prediction_length": HORIZON, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 2, "d_model": 16,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0, "use_cache": False,
}  # fmt: skip
LED = {
    "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_encoder_position_embeddings": 32,
    "max_decoder_position_embeddings": 32, "attention_window": 4, "pad_token_id": 1, "bos_token_id": 0,
    "eos_token_id": 1, "decoder_start_token_id": 0, "use_cache": False,
}  # fmt: skip
LONG_T5 = {
    "vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "local_radius": 3,
    "global_block_size": 4, "pad_token_id": 0, "decoder_start_token_id": 0, "use_cache": False,
}  # fmt: skip

SEQUENCES: tuple[Entry, ...] = (
    _built("PatchTST", "PatchTSTForPrediction", "PatchTSTConfig", own_loss, series(16),
           "BatchNorm of a transposed input", num_hidden_layers=2, num_attention_heads=2, ffn_dim=32,
           attention_dropout=0.1, ff_dropout=0.1, path_dropout=0.1, **PATCHED),
    _built("PatchTSMixer", "PatchTSMixerForPrediction", "PatchTSMixerConfig", own_loss, series(16),
           "BatchNorm of a transposed input", num_layers=2, norm_mlp="BatchNorm", mode="mix_channel", **PATCHED),
    _causal("Qwen3-Next", "Qwen3NextConfig", head_dim=4, linear_key_head_dim=4, linear_value_head_dim=4,
            linear_num_key_heads=2, linear_num_value_heads=2, mlp_only_layers=[0, 1],
            layer_types=["linear_attention", "full_attention"], float64=False,
            shows="convolutions of transposed sequences", **{**ROPE, "num_hidden_layers": 2}),
    _built("Longformer", "LongformerForSequenceClassification", "LongformerConfig", own_loss, long_text,
           "a late number decides a branch", attention_window=4, num_labels=3, pad_token_id=1, **ENCODER),
    _built("LED", "LEDForConditionalGeneration", "LEDConfig", own_loss, attended_translation,
           "a late number decides a branch", **LED),
    _built("LongT5", "LongT5ForConditionalGeneration", "LongT5Config", own_loss, long_translation, "local attention",
           **LONG_T5),
    _built("LongT5, global", "LongT5ForConditionalGeneration", "LongT5Config", own_loss, long_translation,
           "local attention with global blocks", encoder_attention_type="transient-global", **LONG_T5),
    _built("Informer", "InformerForPrediction", "InformerConfig", own_loss, dated(10),
           "passes a mask of another size where it is exported", **DATED),
    _built("ProphetNet", "ProphetNetForConditionalGeneration", "ProphetNetConfig", own_loss, plain_translation,
           "attention of two streams, an assertion about values", vocab_size=VOCABULARY, hidden_size=16,
           encoder_ffn_dim=32, num_encoder_layers=2, num_encoder_attention_heads=2, decoder_ffn_dim=32,
           num_decoder_layers=2, num_decoder_attention_heads=2, max_position_embeddings=32, use_cache=False),
    _built("Time series transformer", "TimeSeriesTransformerForPrediction", "TimeSeriesTransformerConfig", own_loss,
           dated(10), **DATED),
    _built("Autoformer", "AutoformerForPrediction", "AutoformerConfig", own_loss, dated(10),
           "attention to lags of the largest autocorrelation, found by Fourier transforms", label_length=4,
           float64=False, moving_average=3, encoder_attention_heads=2, decoder_attention_heads=2, **DATED),
)  # fmt: skip
