"""Small models whose batches have another size in every step."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import transformers
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional as F

from ..zoo.entry import Entry
from ..zoo.language import LANGUAGE, LENGTH, own_loss

ROWS = 4


@frozen
class Case:
    """A model and its batches.

    Args:
        model: creates it.
        step: the training step.
        batch: a batch of a size: a length, or the height of an image.
        sizes: some sizes; the first one is the example's.
        exports: calls of torch's export for a capture; 2 where the model's library runs other code while it exports.
    """

    model: Callable[[], nn.Module]
    step: Callable[[nn.Module, Any], Any]
    batch: Callable[[int], Any]
    sizes: tuple[int, ...] = (9, 14, 33)
    exports: int = 1


def _tokens(length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 64, (ROWS, length), generator=torch.Generator().manual_seed(seed + length))


def _padded(length: int) -> dict[str, Tensor]:
    """Texts of different lengths, padded to the longest one; labels are those of a collator for language modelling."""
    ids, rows = _tokens(length), torch.arange(ROWS)[:, None]
    mask = torch.arange(length)[None] < length - rows
    labels = ids.masked_fill(~mask, -100)
    return {"input_ids": ids.masked_fill(~mask, 0), "attention_mask": mask.long(), "labels": labels}


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """What makes a model, with the same parameters each time."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return make()

    return model


def of_transformers(model: str, config: str, **sizes: Any) -> Callable[[], nn.Module]:
    """A model of transformers by the names of its class and of its config's."""

    def make() -> nn.Module:
        return getattr(transformers, model)(getattr(transformers, config)(**sizes))  # type: ignore[no-any-return]

    return seeded(make)


def _translation(length: int) -> dict[str, Tensor]:
    source = _padded(length)
    return {**source, "labels": _tokens(length // 2 + 2, seed=100)}


class UNet(nn.Module):
    """Two resolutions with a skip connection, for images of any even size."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.inner = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.GroupNorm(2, 16), nn.SiLU())
        self.up = nn.Conv2d(16, 8, 3, padding=1)
        self.end = nn.Conv2d(16, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        wide = F.interpolate(self.up(self.inner(skip)), size=skip.shape[-2:], mode="nearest")
        return self.end(torch.cat([skip, wide], 1))


def _images(size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(ROWS, 3, size, size + 2, generator=generator)
    return {"x": x, "y": torch.randint(0, 2, (ROWS, size, size + 2), generator=generator)}


def _classified(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(_flat(model(batch["x"]), batch["x"].ndim), batch["y"].flatten())


def _flat(scores: Tensor, ndim: int) -> Tensor:
    return (scores.movedim(1, -1) if ndim > 2 else scores).flatten(0, -2)


class Recurrent(nn.Module):
    """Two recurrent layers in both directions with dropout between them, and a head."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(16, 64)
        self.recurrent = kind(8, 8, num_layers=2, batch_first=True, dropout=0.1, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embed(x))[0])


class Encoder(nn.Module):
    """An encoder of torch that reads whether the mask that the forward makes is a causal one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x), mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1])))


def _labelled(length: int) -> dict[str, Tensor]:
    return {"x": _tokens(length), "y": _tokens(length, seed=100)}


def of_zoo(entry: Entry, sizes: tuple[int, ...], own: int, dims: Mapping[str, Sequence[int]] | None = None) -> Case:
    """A model of the zoo on batches of other sizes than its own: entries are repeated or left out.

    Args:
        entry: the model.
        sizes: some sizes.
        own: the size of its own batch.
        dims: name of a tensor → the dimensions that differ; by default the second one of every tensor that has one.
    """

    def batch(size: int) -> Any:
        found = dict(entry.batch(ROWS))
        for name, given in found.items():
            for dim in dims.get(name, ()) if dims is not None else (1,) * (given.dim() > 1):
                count = given.shape[dim]
                found[name] = found[name].index_select(dim, torch.arange(size + count - own) % count)
        return found

    return Case(seeded(entry.make), entry.step, batch, sizes)


_SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
_KINDS = ("GPT-NeoX", "Qwen3", "Mistral", "OPT", "BLOOM", "BART")

CASES = {
    **{entry.name.lower(): of_zoo(entry, (9, 14, 30), LENGTH) for entry in LANGUAGE if entry.name in _KINDS},
    "llama": Case(of_transformers("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2, use_cache=False, **_SIZES),
                  own_loss, _padded),
    "bert with dropout": Case(of_transformers("BertForMaskedLM", "BertConfig", **_SIZES), own_loss, _padded),
    "gpt with dropout": Case(of_transformers("GPT2LMHeadModel", "GPT2Config", vocab_size=64, n_positions=64, n_embd=16,
                                             n_layer=2, n_head=4, use_cache=False), own_loss, _padded),
    "t5": Case(of_transformers("T5ForConditionalGeneration", "T5Config", vocab_size=64, d_model=16, d_kv=4, d_ff=32,
                               num_layers=2, num_heads=4, decoder_start_token_id=0, use_cache=False),
               own_loss, _translation),
    "encoder with a mask": Case(seeded(Encoder), _classified, _labelled),
    **{kind.__name__.lower(): Case(seeded(partial(Recurrent, kind)), _classified, _labelled)
       for kind in (nn.LSTM, nn.GRU, nn.RNN)},
    "unet": Case(seeded(UNet), _classified, _images, (8, 12, 20, 32)),
}  # fmt: skip
