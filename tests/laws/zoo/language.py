"""Language, sequence and speech models from transformers."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

from .entry import Entry, classes, generator, tokens

VOCABULARY, LENGTH = 48, 12
Batch = dict[str, torch.Tensor]


def text(rows: int) -> Batch:
    """Inputs, and the tokens that follow them."""
    drawn = tokens(rows, LENGTH + 1, VOCABULARY)
    return {"input_ids": drawn[:, :-1].contiguous(), "labels": drawn[:, 1:].contiguous()}


def padded_text(rows: int) -> Batch:
    """Text with a mask: every row ends earlier than the one before, down to half the length."""
    batch = text(rows)
    ends = LENGTH - torch.arange(rows) % (LENGTH // 2)
    mask = torch.arange(LENGTH) < ends[:, None]
    return {**batch, "attention_mask": mask.long(), "labels": batch["labels"].masked_fill(~mask, -100)}


def classified_text(rows: int) -> Batch:
    """Padded text and a class for each row."""
    return {**padded_text(rows), "labels": classes(rows, 3)}


def translation(rows: int) -> Batch:
    """A source with a mask, and a target."""
    source = padded_text(rows)
    return {
        "input_ids": source["input_ids"],
        "attention_mask": source["attention_mask"],
        "labels": tokens(rows, LENGTH - 3, VOCABULARY),
    }


def next_token(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss of predicting each next token, by hand."""
    logits = model(input_ids=batch["input_ids"]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def masked_next_token(model: nn.Module, batch: Batch) -> Any:
    """The same over the tokens that count, whose number differs by row; the weight makes it a mean over all of them."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    return loss, (batch["labels"] != -100).sum()


def own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss that the model computes itself."""
    return model(**batch).loss


def _causal(name: str, config: str, step: Callable[..., Any] = next_token, batch: Callable[[int], Batch] = text,
            shows: str = "", float64: bool = True, **options: Any) -> Entry:  # fmt: skip
    """A causal language model by the name of its config class."""

    def make() -> nn.Module:
        settings = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, **options}
        made = getattr(transformers, config)(use_cache=False, **settings)
        return transformers.AutoModelForCausalLM.from_config(made)

    return Entry(name, "transformers", make, step, batch, shows, float64)


def _built(name: str, model: str, config: str, step: Callable[..., Any], batch: Callable[[int], Batch],
           shows: str = "", float64: bool = True, **options: Any) -> Entry:  # fmt: skip
    """Any other model, by the names of its class and its config class."""

    def make() -> nn.Module:
        return getattr(transformers, model)(getattr(transformers, config)(**options))

    return Entry(name, "transformers", make, step, batch, shows, float64)


ROPE = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "attention_dropout": 0.1,
}
ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
SEQ2SEQ = {
    "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32,
    "attention_dropout": 0.1, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0,
    "use_cache": False,
}  # fmt: skip


def speech(rows: int) -> Batch:
    """Mel features of shape (rows, 8, 40), and a transcript."""
    features = torch.randn(rows, 8, 40, generator=generator())
    return {"input_features": features, "labels": tokens(rows, LENGTH - 3, VOCABULARY)}


def waveform(rows: int) -> Batch:
    """Waves of 400 samples, and a class for each."""
    return {"input_values": torch.randn(rows, 400, generator=generator()), "labels": classes(rows, 3)}


LANGUAGE: tuple[Entry, ...] = (
    _causal("GPT-2", "GPT2Config", n_positions=32, n_embd=16, n_layer=3, n_head=2, shows="tied embeddings"),
    _causal("GPT-2, its own loss", "GPT2Config", own_loss, padded_text, "a mask, the model's loss",
            n_positions=32, n_embd=16, n_layer=2, n_head=2),
    _causal("GPT-NeoX", "GPTNeoXConfig", hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
            intermediate_size=32, max_position_embeddings=32, hidden_dropout=0.1, attention_dropout=0.1,
            shows="parallel residual"),
    _causal("GPT-J", "GPTJConfig", n_positions=32, n_embd=16, n_layer=3, n_head=2, rotary_dim=4,
            attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1,
            float64=False, shows="attention in float32 in any dtype"),
    _causal("Llama", "LlamaConfig", masked_next_token, padded_text, "token-weighted mean", **ROPE),
    _causal("Qwen3", "Qwen3Config", head_dim=4, **ROPE),
    _causal("Gemma2", "Gemma2Config", head_dim=4, sliding_window=8, **ROPE, float64=False,
            shows="soft caps, sliding window, norms in float32 in any dtype"),
    _causal("Gemma3", "Gemma3TextConfig", head_dim=4, sliding_window=8, **ROPE, float64=False,
            shows="two rotary tables, norms in float32 in any dtype"),
    _causal("Mistral", "MistralConfig", sliding_window=8, **ROPE),
    _causal("Mixtral", "MixtralConfig", num_local_experts=4, num_experts_per_tok=2, **ROPE, float64=False,
            shows="experts"),
    _causal("Qwen2-MoE", "Qwen2MoeConfig", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
            shared_expert_intermediate_size=16, **ROPE, float64=False,
            shows="experts, one shared"),
    _causal("Phi", "PhiConfig", resid_pdrop=0.1, embd_pdrop=0.1, **ROPE),
    _causal("Phi-3", "Phi3Config", resid_pdrop=0.1, **ROPE),
    _causal("OPT", "OPTConfig", hidden_size=16, ffn_dim=32, num_hidden_layers=3, num_attention_heads=2,
            max_position_embeddings=32, word_embed_proj_dim=16),
    _causal("BLOOM", "BloomConfig", hidden_size=16, n_layer=3, n_head=2, hidden_dropout=0.1, attention_dropout=0.1,
            shows="ALiBi"),
    _causal("Falcon", "FalconConfig", hidden_size=16, num_hidden_layers=3, num_attention_heads=2, hidden_dropout=0.1,
            attention_dropout=0.1),
    _causal("Mamba", "MambaConfig", hidden_size=16, num_hidden_layers=2, state_size=4, shows="selective scan"),
    _causal("RWKV", "RwkvConfig", hidden_size=16, num_hidden_layers=2, context_length=32, shows="a scan in Python"),
    _causal("StableLM", "StableLmConfig", hidden_dropout=0.1, **ROPE),
    _built("BERT", "BertForMaskedLM", "BertConfig", masked_next_token, padded_text, **ENCODER),
    _built("RoBERTa", "RobertaForSequenceClassification", "RobertaConfig", own_loss, classified_text, num_labels=3,
           pad_token_id=1, **ENCODER),
    _built("ALBERT", "AlbertForMaskedLM", "AlbertConfig", masked_next_token, padded_text, embedding_size=8,
           hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, **ENCODER,
           shows="one layer's weights used three times"),
    _built("DeBERTa", "DebertaV2ForSequenceClassification", "DebertaV2Config", own_loss, classified_text, num_labels=3,
           relative_attention=True, position_buckets=8, pos_att_type=["p2c", "c2p"], **ENCODER,
           shows="disentangled attention"),
    _built("ELECTRA", "ElectraForPreTraining", "ElectraConfig", own_loss,
           lambda rows: {**padded_text(rows), "labels": (tokens(rows, LENGTH, 4) == 2).long()}, embedding_size=8,
           **ENCODER),
    _built("DistilBERT", "DistilBertForSequenceClassification", "DistilBertConfig", own_loss, classified_text,
           vocab_size=VOCABULARY, dim=16, hidden_dim=32, n_layers=3, n_heads=2, max_position_embeddings=32,
           num_labels=3),
    _built("T5", "T5ForConditionalGeneration", "T5Config", own_loss, translation, vocab_size=VOCABULARY, d_model=16,
           d_kv=8, d_ff=32, num_layers=2, num_heads=2, pad_token_id=0, decoder_start_token_id=0, use_cache=False,
           shows="encoder and decoder, shared embeddings"),
    _built("BART", "BartForConditionalGeneration", "BartConfig", own_loss, translation, **SEQ2SEQ,
           shows="encoder and decoder"),
    _built("Pegasus", "PegasusForConditionalGeneration", "PegasusConfig", own_loss, translation, **SEQ2SEQ),
    _built("Whisper", "WhisperForConditionalGeneration", "WhisperConfig", own_loss, speech, vocab_size=VOCABULARY,
           num_mel_bins=8, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
           decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=20,
           max_target_positions=32, pad_token_id=0, bos_token_id=0, eos_token_id=1, decoder_start_token_id=0,
           attention_dropout=0.1, use_cache=False, shows="convolutions before attention"),
    _built("Wav2Vec2", "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", own_loss, waveform, hidden_size=16,
           num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, conv_dim=(8, 8), conv_stride=(5, 2),
           conv_kernel=(10, 3), num_feat_extract_layers=2, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2,
           num_labels=3, classifier_proj_size=8, mask_time_prob=0.0, layerdrop=0.0,
           shows="weight normalisation"),
)  # fmt: skip
