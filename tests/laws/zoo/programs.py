"""Training programs of plain torch: generative models, losses between rows, policies, recurrences."""

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, MixtureSameFamily, Normal, kl_divergence
from torch.nn import functional as F

from .entry import Entry, classes, generator, tokens
from .plain import labelled, regression, series

WIDTH, VOCABULARY = 16, 32
Batch = dict[str, Any]


def mlp(inputs: int = WIDTH, outputs: int = WIDTH, layers: int = 2) -> nn.Sequential:
    """Linear layers with Tanh between."""
    sizes = [inputs, *[WIDTH] * layers]
    inner = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*inner, nn.Linear(WIDTH, outputs))


def vectors(rows: int) -> Batch:
    """Vectors of shape (rows, 16), and a class for each."""
    return {"x": torch.randn(rows, WIDTH, generator=generator()), "y": classes(rows, 4)}


class Autoencoder(nn.Module):
    """A variational autoencoder with the distributions of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(WIDTH, 8), mlp(4, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        posterior = Normal(mean, (0.5 * log_variance).exp())
        return self.decoder(posterior.rsample()), kl_divergence(posterior, Normal(0.0, 1.0)).sum(-1).mean()


def elbo(model: nn.Module, batch: Batch) -> Tensor:
    reconstruction, divergence = model(batch["x"])
    return F.mse_loss(reconstruction, batch["x"]) + 0.01 * divergence


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = mlp(8, WIDTH), mlp(WIDTH, 1)


def both_losses(model: Any, batch: Batch) -> Tensor:
    """Generator and discriminator in one loss, the fake detached for one of them."""
    x = batch["x"]
    fake = model.generator(torch.randn(len(x), 8, dtype=x.dtype, device=x.device))
    real, made = model.discriminator(x), model.discriminator(fake.detach())
    return F.softplus(made).mean() + F.softplus(-real).mean() + F.softplus(-model.discriminator(fake)).mean()


def contrast(model: Any, batch: Batch) -> Tensor:
    """Every row against all others, in both directions."""
    first, second = (F.normalize(model[name](batch[name]), dim=-1) for name in ("x", "y"))
    logits = first @ second.T / 0.1
    numbers = torch.arange(len(logits))
    return (F.cross_entropy(logits, numbers) + F.cross_entropy(logits.T, numbers)) / 2


def triplet(model: nn.Module, batch: Batch) -> Tensor:
    """The hardest positive and negative of each row."""
    found = F.normalize(model(batch["x"]), dim=-1)
    apart, same = torch.cdist(found, found), batch["y"][:, None] == batch["y"][None]
    return F.relu((apart * same).amax(1) - (apart + same * 1e3).amin(1) + 0.2).mean()


class Distilled(nn.Module):
    """A student, and a teacher that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = mlp(WIDTH, 4).requires_grad_(False), mlp(WIDTH, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            teacher = self.teacher(x)
        return self.student(x), teacher


def distil(model: nn.Module, batch: Batch) -> Tensor:
    student, teacher = model(batch["x"])
    soft = F.kl_div(F.log_softmax(student / 2, -1), F.softmax(teacher / 2, -1), reduction="batchmean")
    return 4 * soft + F.cross_entropy(student, batch["y"], label_smoothing=0.1)


def policy(model: Any, batch: Batch) -> Tensor:
    """A clipped policy gradient with a value baseline and entropy."""
    choice, value = Categorical(logits=model["policy"](batch["x"])), model["value"](batch["x"]).squeeze(-1)
    ratio = (choice.log_prob(batch["y"]) - batch["old"]).exp()
    advantage = batch["reward"] - value.detach()
    clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    return F.mse_loss(value, batch["reward"]) - clipped - 0.01 * choice.entropy().mean()


def episodes(rows: int) -> Batch:
    reward, old = torch.rand(2, rows, generator=generator())
    return {**vectors(rows), "reward": reward, "old": -old}


class Coupling(nn.Module):
    """Affine coupling layers, each of which changes the other half, and the logarithm of their determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mlp(WIDTH // 2, WIDTH, 1) for _ in range(4))
        self.mix = nn.Parameter(torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0])

    def forward(self, x: Tensor) -> Tensor:
        x, logarithm = x @ self.mix, torch.linalg.slogdet(self.mix)[1]
        for layer in self.layers:
            kept, changed = x.chunk(2, -1)
            scale, shift = layer(kept).chunk(2, -1)
            x = torch.cat((changed * scale.tanh().exp() + shift, kept), -1)
            logarithm = logarithm + scale.tanh().sum(-1)
        return (0.5 * x.pow(2).sum(-1) - logarithm).mean()


class Mixture(nn.Module):
    """A mixture density network."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = mlp(), nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(3))

    def forward(self, x: Tensor) -> MixtureSameFamily:
        weight, mean, scale = (head(self.body(x)) for head in self.heads)
        return MixtureSameFamily(Categorical(logits=weight), Normal(mean, scale.exp()))


class Field(nn.Module):
    """A linear-chain conditional random field over an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.recurrent = nn.Embedding(VOCABULARY, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head, self.transitions = nn.Linear(WIDTH, 5), nn.Parameter(0.1 * torch.randn(5, 5))

    def forward(self, x: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        scores, rows = self.head(self.recurrent(self.embedding(x))[0]), torch.arange(len(x))
        path, alpha = scores[rows, 0, tags[:, 0]], scores[:, 0]
        for t in range(1, x.shape[1]):
            step = scores[rows, t, tags[:, t]] + self.transitions[tags[:, t - 1], tags[:, t]]
            path = path + mask[:, t] * step
            following = torch.logsumexp(alpha[:, :, None] + self.transitions + scores[:, t, None], 1)
            alpha = torch.where(mask[:, t, None], following, alpha)
        return (alpha.logsumexp(-1) - path).mean()


def tagged(rows: int) -> Batch:
    lengths = torch.randint(2, 5, (rows, 1), generator=generator())
    tags = torch.randint(0, 5, (rows, 4), generator=generator())
    return {"x": tokens(rows, 4, VOCABULARY), "tags": tags, "mask": torch.arange(4) < lengths}


class Speech(nn.Module):
    """Convolution and recurrence over frames; log-probabilities of twelve symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.recurrent, self.head = nn.GRU(WIDTH, WIDTH, batch_first=True), mlp(WIDTH, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(self.layers(x))[0]).log_softmax(-1)


def ctc(model: nn.Module, batch: Batch) -> Tensor:
    found = model(batch["x"]).transpose(0, 1)
    return F.ctc_loss(found, batch["y"], batch["frames"], batch["lengths"], zero_infinity=True)


def utterances(rows: int) -> Batch:
    symbols = torch.randint(1, 12, (rows, 2), generator=generator())
    lengths = torch.randint(1, 3, (rows,), generator=generator())
    frames = torch.randn(rows, 5, WIDTH, generator=generator())
    return {"x": frames, "y": symbols, "frames": torch.full((rows,), 5), "lengths": lengths}


class Translation(nn.Module):
    """A decoder cell with teacher forcing."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.encoder = nn.Embedding(VOCABULARY, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.cell, self.head = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(self.embedding(x))[1][0]
        found = []
        for t in range(4):
            hidden = self.cell(self.embedding(x[:, t]), hidden)
            found.append(self.head(hidden))
        return torch.stack(found, 1)


def next_tokens(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["x"][:, 1:5].flatten())


class Packed(nn.Module):
    """An LSTM over sequences that are packed by length."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.recurrent(packed)[1][0][-1]


class Lengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.recurrent, self.after = mlp(), Packed(), mlp(WIDTH, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.after(self.recurrent(self.before(x), lengths))


PROGRAMS: tuple[Entry, ...] = (
    Entry("VAE", "torch", Autoencoder, elbo, vectors, "distributions, whose argument checks are left out"),
    Entry("GAN", "torch", Adversaries, both_losses, vectors, "two networks, a detached fake, one loss"),
    Entry("Two towers", "torch", lambda: nn.ModuleDict({"x": mlp(WIDTH, 8), "y": mlp(WIDTH, 8)}), contrast, regression,
          "a loss over all pairs of rows"),
    Entry("Hard triplets", "torch", lambda: mlp(WIDTH, 8), triplet, vectors, "the hardest pairs of rows"),
    Entry("Distillation", "torch", Distilled, distil, vectors, "a frozen teacher, label smoothing"),
    Entry("Policy gradient", "torch", lambda: nn.ModuleDict({"policy": mlp(WIDTH, 4), "value": mlp(WIDTH, 1)}), policy,
          episodes, "two networks, a categorical distribution"),
    Entry("Normalising flow", "torch", Coupling, lambda model, batch: model(batch["x"]), vectors, "determinants"),
    Entry("Mixture density", "torch", Mixture,
          lambda model, batch: -model(batch["x"]).log_prob(batch["y"].to(batch["x"].dtype)).mean(), vectors,
          "a distribution as a result"),
    Entry("CRF", "torch", Field, lambda model, batch: model(**batch), tagged, "a recursion in Python"),
    Entry("CTC", "torch", Speech, ctc, utterances, "a loss that reads lengths"),
    Entry("Teacher forcing", "torch", Translation, next_tokens, labelled, "a cell in a loop"),
    Entry("Packed lengths", "torch", Lengths,
          lambda model, batch: F.cross_entropy(model(batch["x"], batch["y"] + 2), batch["y"]), series,
          "sequences packed by length"),
)  # fmt: skip
