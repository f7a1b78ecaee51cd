"""Further kinds of models whose batches have another size in every step: language, images, sound, molecules, points."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..zoo.language import LENGTH, own_loss
from ..zoo.models import ZOO
from .models import ROWS, Case, of_transformers, of_zoo, seeded

WIDTH, CLASSES = 8, 3


def _draw(size: int) -> torch.Generator:
    return torch.Generator().manual_seed(size)


def _classes(size: int) -> Tensor:
    return torch.randint(0, CLASSES, (ROWS,), generator=_draw(size))


def _classified(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(*(tensor for name, tensor in batch.items() if name != "y")), batch["y"])


class Molecules(nn.Module):
    """Messages along the bonds of padded molecules, and the mean over their atoms."""

    def __init__(self) -> None:
        super().__init__()
        self.atoms, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.messages = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, atoms: Tensor, bonds: Tensor) -> Tensor:
        there = (atoms > 0).unsqueeze(-1)
        hidden = self.atoms(atoms)
        for layer in self.messages:
            sent = bonds @ layer(hidden) / bonds.sum(-1, keepdim=True).clamp(min=1)
            hidden = (hidden + sent.relu()).masked_fill(~there, 0)
        return self.head(hidden.sum(1) / there.sum(1))


def _molecules(size: int) -> dict[str, Tensor]:
    atoms = torch.randint(1, 20, (ROWS, size), generator=_draw(size))
    atoms = atoms.masked_fill(torch.arange(size) >= size - torch.arange(ROWS)[:, None], 0)
    bonds = (torch.rand(ROWS, size, size, generator=_draw(size)) < 0.3).float()
    return {"atoms": atoms, "bonds": bonds, "y": _classes(size)}


class Edges(nn.Module):
    """Graphs with lists of edges: messages are gathered from their sources and added at their ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        hidden = self.embed(x)
        sources, ends = (each.unsqueeze(-1).expand(-1, -1, WIDTH) for each in edges.unbind(1))
        for layer in self.layers:
            sent = layer(torch.cat([hidden.gather(1, sources), hidden.gather(1, ends)], -1)).relu()
            hidden = hidden + torch.zeros_like(hidden).scatter_add(1, ends, sent)
        return self.head(hidden.mean(1))


def _graphs(size: int) -> dict[str, Tensor]:
    x = torch.randn(ROWS, size, 4, generator=_draw(size))
    edges = torch.randint(0, size, (ROWS, 2, 2 * size + 1), generator=_draw(size))
    return {"x": x, "edges": edges, "y": _classes(size)}


class Points(nn.Module):
    """The largest feature over the points of a cloud, as in PointNet."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(
            nn.Conv1d(3, WIDTH, 1), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Conv1d(WIDTH, WIDTH, 1), nn.ReLU()
        )
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.each(x.transpose(1, 2)).max(-1).values)


def _points(size: int) -> dict[str, Tensor]:
    return {"x": torch.randn(ROWS, size, 3, generator=_draw(size)), "y": _classes(size)}


class Causal(nn.Module):
    """Dilated causal convolutions over a wave with residuals, as in WaveNet and temporal convolutional networks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Conv1d(1, WIDTH, 1), nn.Conv1d(WIDTH, 16, 1)
        self.layers = nn.ModuleList(nn.Conv1d(WIDTH, 2 * WIDTH, 2, dilation=2**n) for n in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.unsqueeze(1))
        for layer in self.layers:
            tanh, gate = layer(F.pad(hidden, (layer.dilation[0], 0))).chunk(2, 1)
            hidden = hidden + tanh.tanh() * gate.sigmoid()
        return self.head(hidden)


def _waves(size: int) -> dict[str, Tensor]:
    x = torch.randn(ROWS, size, generator=_draw(size))
    return {"x": x, "y": torch.randint(0, 16, (ROWS, size), generator=_draw(size))}


class Spoken(nn.Module):
    """Strided convolutions over a spectrogram, and a recurrent layer, as in Deep Speech."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.ReLU(),
        )
        self.recurrent, self.head = nn.GRU(16, WIDTH, batch_first=True, bidirectional=True), nn.Linear(2 * WIDTH, 12)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.convolutions(x.unsqueeze(1)).permute(0, 3, 1, 2).flatten(2)
        return self.head(self.recurrent(hidden)[0]).flatten(0, 1)


def _spectrograms(size: int) -> dict[str, Tensor]:
    x = torch.randn(ROWS, 8, 2 * size, generator=_draw(size))
    return {"x": x, "y": torch.randint(1, 12, (ROWS, size), generator=_draw(size))}


class Translator(nn.Module):
    """`nn.Transformer`, with a causal mask and masks of the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target, self.head = nn.Embedding(40, 16), nn.Embedding(40, 16), nn.Linear(16, 40)
        self.inner = nn.Transformer(16, 2, 2, 2, 32, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        padding = source == 0
        return self.head(
            self.inner(
                self.source(source), self.target(target), tgt_mask=causal, src_key_padding_mask=padding,
                memory_key_padding_mask=padding, tgt_is_causal=True,
            )
        ).flatten(0, 1)  # fmt: skip


def _translated(model: nn.Module, batch: Any) -> Tensor:
    target = batch["target"]
    return F.cross_entropy(model(batch["source"], target[:, :-1]), target[:, 1:].flatten())


def _sentences(size: int) -> dict[str, Tensor]:
    source = torch.randint(1, 40, (ROWS, size), generator=_draw(size))
    source = source.masked_fill(torch.arange(size) >= size - torch.arange(ROWS)[:, None], 0)
    return {"source": source, "target": torch.randint(1, 40, (ROWS, size // 2 + 3), generator=_draw(size))}


class Pooled(nn.Module):
    """Convolutions with pooling to a fixed size, and a classifier, as VGG is used for images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def _pictures(size: int) -> dict[str, Tensor]:
    return {"x": torch.randn(ROWS, 3, size, size + 4, generator=_draw(size)), "y": _classes(size)}


class Mixed(nn.Module):
    """A mixture of experts: each token goes to its best expert, through a dense mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router, self.head = nn.Embedding(40, WIDTH), nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 40)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        shares = self.router(hidden).softmax(-1)
        best = F.one_hot(shares.argmax(-1), 3) * shares
        mixed = sum(best[..., n, None] * expert(hidden) for n, expert in enumerate(self.experts))
        return self.head(hidden + mixed).flatten(0, 1)


def _next(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"].flatten())


def _texts(size: int) -> dict[str, Tensor]:
    x = torch.randint(0, 40, (ROWS, size + 1), generator=_draw(size))
    return {"x": x[:, :-1], "y": x[:, 1:]}


def _interpolated(model: nn.Module, batch: Any) -> Tensor:
    return model(pixel_values=batch["x"], labels=batch["y"], interpolate_pos_encoding=True).loss


def _masked_texts(size: int) -> dict[str, Tensor]:
    ids = torch.randint(3, 48, (ROWS, size), generator=_draw(size))
    mask = torch.arange(size) < size - torch.arange(ROWS)[:, None]
    return {
        "input_ids": ids.masked_fill(~mask, 0), "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)
    }  # fmt: skip


_LANGUAGE = (
    "GPT-J", "Gemma2", "Mixtral", "Phi-3", "Falcon", "ALBERT", "Pegasus", "FNet", "MPNet", "SqueezeBERT",
)  # fmt: skip
_TEXT = {
    "vocab_size": 48, "hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
_IMAGE = {"pixel_values": (2, 3)}

KINDS = {
    **{name.lower(): of_zoo(ZOO[name], (9, 14, 30), LENGTH) for name in _LANGUAGE},
    "modernbert": Case(of_transformers(
        "ModernBertForMaskedLM", "ModernBertConfig", intermediate_size=32, num_hidden_layers=3,
        global_attn_every_n_layers=2, local_attention=8, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
        **_TEXT,
    ), own_loss, _masked_texts),
    "deberta": Case(of_transformers(
        "DebertaV2ForMaskedLM", "DebertaV2Config", intermediate_size=32, num_hidden_layers=2, relative_attention=True,
        position_buckets=8, pos_att_type=["p2c", "c2p"], **_TEXT,
    ), own_loss, _masked_texts),
    "vit": Case(of_transformers(
        "ViTForImageClassification", "ViTConfig", hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, image_size=32, patch_size=8, num_labels=CLASSES,
    ), _interpolated, lambda size: {**_pictures(size), "x": _pictures(size)["x"][..., :size]},
                (32, 40, 64), exports=2),
    "clip": of_zoo(ZOO["CLIP"], (5, 6, 8), 8, {"input_ids": (1,)}),
    "resnet": of_zoo(ZOO["ResNet"], (32, 40, 64), 32, _IMAGE),
    "convnext": of_zoo(ZOO["ConvNeXt"], (32, 48, 64), 32, _IMAGE),
    "segformer": of_zoo(ZOO["SegFormer"], (32, 48, 64), 32, _IMAGE | {"labels": (1, 2)}),
    "wav2vec2": of_zoo(ZOO["Wav2Vec2"], (400, 430, 610), 400, {"input_values": (1,)}),
    "whisper": of_zoo(ZOO["Whisper"], (9, 12, 20), LENGTH - 3, {"labels": (1,)}),
    "molecules": Case(seeded(Molecules), _classified, _molecules),
    "graphs with edges": Case(seeded(Edges), _classified, _graphs),
    "clouds of points": Case(seeded(Points), _classified, _points),
    "causal convolutions": Case(seeded(Causal), _classified, _waves, (20, 31, 50)),
    "speech": Case(seeded(Spoken), _next, _spectrograms, (12, 18, 33)),
    "transformer of torch": Case(seeded(Translator), _translated, _sentences),
    "images pooled to one size": Case(seeded(Pooled), _classified, _pictures, (8, 11, 32)),
    "mixture of experts": Case(seeded(Mixed), _next, _texts),
}  # fmt: skip
