"""The training scripts of github.com/pytorch/examples, with their networks and losses."""

from collections import namedtuple
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.coverage.case import ROWS, Case, Suite, classes, definitions, images
from benchmarks.coverage.torchvision_models import classifier

Pair = namedtuple("Pair", ("premise", "hypothesis", "label"))
VOCABULARY = 50


def nll_step(model: nn.Module, batch: Any) -> Tensor:
    """The loss of the MNIST scripts."""
    return F.nll_loss(model(batch["image"]), batch["label"])


def mnist(script: Path) -> Case:
    """A classifier of digits."""
    return Case(definitions(script).Net().train(), nll_step, {"image": images(28, 1), "label": classes(10)})


def dcgan(script: Path) -> Case:
    """Both losses of DCGAN, for one optimizer each, on real images and noise of the batch."""
    found = definitions(script, nz=16, ngf=8, ndf=8, nc=3)
    model = nn.ModuleDict({"G": found.Generator(1), "D": found.Discriminator(1)}).apply(found.weights_init).train()

    def step(model: Any, batch: Any) -> Tensor:
        real, ones = batch["real"], torch.ones(len(batch["real"]), dtype=batch["real"].dtype)
        fake = model["G"](batch["noise"])
        loss = F.binary_cross_entropy(model["D"](real), ones)
        loss = loss + F.binary_cross_entropy(model["D"](fake.detach()), torch.zeros_like(ones))
        return loss + F.binary_cross_entropy(model["D"](fake), ones)

    return Case(model, step, {"real": images(64), "noise": torch.randn(ROWS, 16, 1, 1)})


def fast_neural_style(folder: Path) -> Case:
    """Content and style losses by a fixed VGG, towards the Gram matrices of one style image."""
    transformer = definitions(folder / "transformer_net.py").TransformerNet().train()
    utils = definitions(folder / "utils.py")
    pretrained = torchvision.models.vgg16
    torchvision.models.vgg16 = lambda weights: pretrained(weights=None)
    vgg = definitions(folder / "vgg.py").Vgg16(requires_grad=False)
    torchvision.models.vgg16 = pretrained
    style = [utils.gram_matrix(y) for y in vgg(utils.normalize_batch(torch.rand(1, 3, 32, 32) * 255))]
    model = nn.ModuleDict({"transformer": transformer, "vgg": vgg})

    def step(model: Any, x: Tensor) -> Tensor:
        y = utils.normalize_batch(model["transformer"](x))
        x = utils.normalize_batch(x)
        of_y, of_x = model["vgg"](y), model["vgg"](x)
        loss = 1e2 * F.mse_loss(of_y.relu2_2, of_x.relu2_2)
        for features, wanted in zip(of_y, style, strict=True):
            loss = loss + 1e4 * F.mse_loss(utils.gram_matrix(features), wanted.expand(len(y), -1, -1).to(y))
        return loss

    return Case(model, step, torch.rand(ROWS, 3, 32, 32) * 255)


def translation(script: Path) -> Case:
    """A translator; the sequence comes first."""
    found = definitions(script)
    model = found.Translator(2, 2, 32, 4, VOCABULARY, VOCABULARY, 64, 0.1).train()

    def step(model: Any, batch: Any) -> Tensor:
        source, target = batch["source"], batch["target"]
        mask = torch.triu(torch.full((len(target) - 1, len(target) - 1), float("-inf")), diagonal=1)
        source_mask, padding = torch.zeros(len(source), len(source)).bool(), (source == 1).T
        logits = model(source, target[:-1], source_mask, mask, padding, (target[:-1] == 1).T, padding)
        return F.cross_entropy(logits.flatten(0, 1), target[1:].flatten(), ignore_index=1)

    batch = {"source": torch.randint(2, VOCABULARY, (9, ROWS)), "target": torch.randint(2, VOCABULARY, (7, ROWS))}
    return Case(model, step, batch, {"batch_dims": 1})


def forward_forward(script: Path) -> Case:
    """The goodness losses of both layers of the forward-forward algorithm."""
    found = definitions(script, args=SimpleNamespace(lr=0.03, threshold=2.0, epochs=1, log_interval=1), device="cpu")
    found.Layer.train = nn.Module.train
    model = nn.ModuleList([found.Layer(784, 32), found.Layer(32, 32)])

    def step(model: Any, batch: Any) -> Tensor:
        positive, negative, loss = batch["positive"], batch["negative"], 0
        for layer in model:
            positive, negative = layer(positive.detach()), layer(negative.detach())
            good, bad = positive.pow(2).mean(1), negative.pow(2).mean(1)
            loss = loss + torch.log1p(torch.exp(torch.cat([-good + layer.threshold, bad - layer.threshold]))).mean()
        return loss

    return Case(model, step, {"positive": torch.rand(ROWS, 784), "negative": torch.rand(ROWS, 784)})


def regression() -> Case:
    """A polynomial of degree four."""
    x = torch.randn(32, 1)
    batch = {"x": torch.cat([x**i for i in range(1, 5)], 1), "y": torch.randn(32, 1)}
    return Case(nn.Linear(4, 1), lambda m, b: F.smooth_l1_loss(m(b["x"]), b["y"]), batch)


def returns(rewards: Tensor, discount: float = 0.99) -> Tensor:
    """Discounted returns of an episode, normalised over it, as both scripts have them."""
    total, found = torch.zeros(()), []
    for reward in rewards.flip(0):
        total = reward + discount * total
        found.insert(0, total)
    stacked = torch.stack(found)
    return (stacked - stacked.mean()) / (stacked.std() + 1e-8)


def reinforce(folder: Path, name: str) -> Case:
    """REINFORCE and actor-critic on recorded steps of an episode, whose returns are in the batch."""
    from torch.distributions import Categorical

    model = definitions(folder / f"{name}.py", args=SimpleNamespace(seed=0)).Policy().train()
    batch = {"state": torch.randn(ROWS, 4), "action": classes(2), "return": returns(torch.ones(ROWS))}

    def step(model: Any, batch: Any) -> Tensor:
        if name == "reinforce":
            log_prob = Categorical(model(batch["state"])).log_prob(batch["action"])
            return (-log_prob * batch["return"]).sum()
        probabilities, value = model(batch["state"])
        log_prob, advantage = (
            Categorical(probabilities).log_prob(batch["action"]),
            batch["return"] - value[:, 0].detach(),
        )
        return (-log_prob * advantage).sum() + F.smooth_l1_loss(value[:, 0], batch["return"], reduction="sum")

    return Case(model, step, batch)


def siamese(script: Path) -> Case:
    """Pairs of digits that are the same or not."""
    batch = {"first": images(28, 1), "second": images(28, 1), "same": classes(2).float()}
    return Case(
        definitions(script).SiameseNetwork().train(),
        lambda m, b: F.binary_cross_entropy(m(b["first"], b["second"]).squeeze(), b["same"]), batch,
    )  # fmt: skip


def super_resolution(script: Path) -> Case:
    """Super-resolution by a factor of three."""
    batch = {"small": torch.rand(ROWS, 1, 16, 16), "large": torch.rand(ROWS, 1, 48, 48)}
    return Case(definitions(script).Net(3).train(), lambda m, b: F.mse_loss(m(b["small"]), b["large"]), batch)


def time_sequence(script: Path) -> Case:
    """Two LSTM cells over a sine wave, in float64."""
    batch = {"input": torch.randn(ROWS, 12).double(), "target": torch.randn(ROWS, 12).double()}
    return Case(definitions(script).Sequence().double(), lambda m, b: F.mse_loss(m(b["input"]), b["target"]), batch)


def vae(script: Path) -> Case:
    """A variational autoencoder, whose loss is a sum over the batch."""
    found = definitions(script)

    def step(model: nn.Module, batch: Tensor) -> Any:
        return found.loss_function(*_reordered(model(batch), batch))

    return Case(found.VAE().train(), step, torch.rand(ROWS, 1, 28, 28))


def _reordered(result: Any, batch: Tensor) -> tuple[Any, ...]:
    reconstruction, mean, log_variance = result
    return reconstruction, batch, mean, log_variance


def word_language_model(script: Path, kind: str) -> Case:
    """Word models with the sequence first. A recurrent one starts each step from the last step's hidden state."""
    found = definitions(script)
    batch = {"x": classes(VOCABULARY, 7, ROWS), "y": classes(VOCABULARY, 7, ROWS)}
    if kind == "Transformer":
        model = found.TransformerModel(VOCABULARY, 32, 4, 32, 2, 0.2).train()
        return Case(
            model, lambda m, b: F.nll_loss(m(b["x"]).view(-1, VOCABULARY), b["y"].view(-1)), batch, {"batch_dims": 1}
        )
    model = found.RNNModel(kind, VOCABULARY, 32, 32, 2, 0.2).train()

    def step(model: Any, batch: Any) -> Tensor:
        hidden = model.init_hidden(batch["x"].shape[1])
        output, _ = model(batch["x"], hidden)
        return F.nll_loss(output, batch["y"].view(-1))

    return Case(model, step, batch, {"batch_dims": 1})


def graph_step(model: Any, batch: Any) -> Tensor:
    """The loss on some nodes of one graph."""
    return F.nll_loss(model(batch["x"], batch["adjacency"])[: ROWS // 2], batch["label"][: ROWS // 2])


def graph(model: nn.Module) -> Case:
    """A network on one graph, which all microbatches would share: there is no batch to cut."""
    adjacency = ((torch.rand(ROWS, ROWS) < 0.4) | torch.eye(ROWS).bool()).float()
    batch = {"x": torch.randn(ROWS, 16), "adjacency": adjacency, "label": classes(5)}
    return Case(model.train(), graph_step, batch, {"microbatches": 1})


def snli(script: Path) -> Case:
    """Pairs of sentences, with the sequence first."""
    config = SimpleNamespace(
        projection=True, d_proj=16, d_embed=16, d_hidden=16, n_layers=1, dp_ratio=0.2, birnn=True, n_cells=2,
        n_embed=VOCABULARY,
        d_out=3, fix_emb=False,
    )  # fmt: skip
    batch = {"premise": classes(VOCABULARY, 7, ROWS), "hypothesis": classes(VOCABULARY, 5, ROWS), "label": classes(3)}
    return Case(
        definitions(script).SNLIClassifier(config).train(),
        lambda m, b: F.cross_entropy(m(Pair(**b)), b["label"]), batch,
        {"batch_dims": {"premise": 1, "hypothesis": 1, "label": 0}},
    )  # fmt: skip


def suite(sources: Path) -> Suite:
    """The models."""
    folder = sources / "examples"
    gcn, gat = (partial(definitions, folder / f"{name}/main.py") for name in ("gcn", "gat"))
    return {
        "dcgan": partial(dcgan, folder / "dcgan/main.py"),
        "fast_neural_style": partial(fast_neural_style, folder / "fast_neural_style/neural_style"),
        "imagenet": partial(classifier, partial(torchvision.models.resnet18, num_classes=10), 64),
        "language_translation": partial(translation, folder / "language_translation/src/model.py"),
        "mnist": partial(mnist, folder / "mnist/main.py"),
        "mnist_forward_forward": partial(forward_forward, folder / "mnist_forward_forward/main.py"),
        "mnist_hogwild": partial(mnist, folder / "mnist_hogwild/main.py"),
        "mnist_rnn": partial(mnist, folder / "mnist_rnn/main.py"),
        "regression": regression,
        "reinforce": partial(reinforce, folder / "reinforcement_learning", "reinforce"),
        "actor_critic": partial(reinforce, folder / "reinforcement_learning", "actor_critic"),
        "siamese_network": partial(siamese, folder / "siamese_network/main.py"),
        "super_resolution": partial(super_resolution, folder / "super_resolution/model.py"),
        "time_sequence_prediction": partial(time_sequence, folder / "time_sequence_prediction/train.py"),
        "vae": partial(vae, folder / "vae/main.py"),
        "word_language_model_lstm": partial(word_language_model, folder / "word_language_model/model.py", "LSTM"),
        "word_language_model_transformer": partial(
            word_language_model, folder / "word_language_model/model.py", "Transformer"
        ),
        "gcn": lambda: graph(gcn().GCN(16, 16, 5)),
        "gat": lambda: graph(gat().GAT(16, 16, 2, 5)),
        "snli": partial(snli, folder / "legacy/snli/model.py"),
    }
