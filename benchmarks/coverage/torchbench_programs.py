"""Models of TorchBench that have code of their own there and that Pfeife counts, with the steps of that code."""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.coverage.case import ROWS, Case, Suite, classes, definitions, images, package

Load = Callable[[str], Any]
"""Imports a module of ``torchbenchmark.models``."""


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """The loss of a classifier."""
    return F.cross_entropy(model(batch["image"]), batch["label"])


def bert(load: Load) -> Case:
    """BERT_pytorch."""
    part = load("BERT_pytorch.bert_pytorch.model")
    model = part.BERTLM(part.BERT(100, hidden=32, n_layers=8, attn_heads=4), 100).train()
    criterion = nn.NLLLoss(ignore_index=0)
    batch = {
        "bert_input": torch.randint(1, 100, (ROWS, 20)), "segment_label": torch.randint(1, 3, (ROWS, 20)),
        "is_next": torch.tensor([0, 1] * (ROWS // 2)), "bert_label": torch.randint(0, 100, (ROWS, 20)),
    }  # fmt: skip
    batch["bert_input"][:, -3:] = 0

    def step(model: nn.Module, batch: Any) -> Tensor:
        next_sentence, words = model(batch["bert_input"], batch["segment_label"])
        next_loss = criterion(next_sentence, batch["is_next"])
        return next_loss + criterion(words.transpose(1, 2), batch["bert_label"])

    return Case(model, step, batch)


def learning_to_paint(load: Load) -> Case:
    """Actor, critic and renderer of LearningToPaint: the loss of the actor and that of the critic."""
    ddpg, critic = load("LearningToPaint.baseline.DRL.ddpg"), load("LearningToPaint.baseline.DRL.critic")
    model = nn.ModuleDict({
        "actor": ddpg.ResNet(9, 18, 65), "critic": critic.ResNet_wobn(12, 18, 1),
        "renderer": ddpg.FCN().requires_grad_(False),
    }).train()  # fmt: skip
    rows = torch.arange(128) / 127
    coord = torch.stack([rows[:, None].expand(128, 128), rows.expand(128, 128)])[None]
    batch = {
        "canvas": torch.rand(4, 3, 128, 128),
        "wanted": torch.rand(4, 3, 128, 128),
        "step": torch.rand(4, 1, 128, 128),
    }

    def step(model: Any, batch: Any) -> Tensor:
        canvas, wanted, time = batch["canvas"], batch["wanted"], batch["step"]
        place = coord.expand(len(canvas), 2, 128, 128)
        action = model["actor"](torch.cat([canvas, wanted, time, place], 1))
        painted = ddpg.decode(action, canvas, model["renderer"])
        value = model["critic"](torch.cat([canvas, painted, wanted, time, place], 1))
        reward = ((canvas - wanted) ** 2).mean((1, 2, 3)) - ((painted - wanted) ** 2).mean((1, 2, 3))
        return F.mse_loss(value[:, 0], reward.detach()) - (value[:, 0] + reward).mean()

    return Case(model, step, batch)


def super_slomo(load: Load) -> Case:
    """Super_SloMo, with small networks and images."""
    import torchvision

    wrapper, slomo = load("Super_SloMo.model_wrapper"), load("Super_SloMo.slomo_model")
    model = wrapper.Model.__new__(wrapper.Model)
    nn.Module.__init__(model)
    model.flowComp, model.ArbTimeFlowIntrp = slomo.UNet(6, 4), slomo.UNet(20, 5)
    model.trainFlowBackWarp = slomo.backWarp(64, 64, "cpu")
    model.vgg16_conv_4_3 = nn.Sequential(*torchvision.models.vgg16(weights=None).features[:22]).requires_grad_(False)
    batch = {
        "index": torch.randint(0, 7, (4,)),
        **{key: torch.rand(4, 3, 64, 64) for key in ("first", "last", "frame")},
    }
    return Case(
        model.train(), lambda m, b: m(b["index"], b["first"], b["last"], b["frame"])[1], batch
    )  # fmt: skip


def cm3leon(load: Load) -> Case:
    """The decoder of cm3leon_generate, trained on the next token."""
    part = load("cm3leon_generate.model")
    model = part.TransformerDecoder(
        nn.Embedding(128, 32, padding_idx=-1), decoder_layers=4, decoder_attention_heads=4, max_target_positions=64,
        embed_dim=32, decoder_ffn_embed_dim=64, no_scale_embedding=True, share_decoder_input_output_embed=True,
        decoder_learned_pos=True, dropout=0.1,
    )  # fmt: skip

    def step(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:])

    return Case(model.train(), step, torch.randint(1, 127, (ROWS, 16)))  # 127 is padding


def dcgan(folder: Path) -> Case:
    """Both losses of DCGAN; the discriminator's part of the generator's loss is a constant."""
    script = definitions(
        folder / "torchbenchmark/models/dcgan/__init__.py", BenchmarkModel=object, COMPUTER_VISION=MagicMock()
    )
    sizes = SimpleNamespace(ngpu=1, nz=16, ngf=8, ndf=8, nc=3)
    model = nn.ModuleDict({"generator": script.Generator(sizes), "discriminator": script.Discriminator(sizes)})
    return Case(model.apply(script.weights_init).train(), gan_step, {"image": images(64)})


def gan_step(model: Any, batch: Any) -> Tensor:
    """The losses of a discriminator and of a generator, on noise that is drawn in the step."""
    real = batch["image"]
    ones, zeros = torch.ones(len(real)), torch.zeros(len(real))
    fake = model["generator"](torch.randn(len(real), 16, 1, 1))
    of_real = F.binary_cross_entropy(model["discriminator"](real).view(-1), ones.to(real))
    of_fake = F.binary_cross_entropy(model["discriminator"](fake.detach()).view(-1), zeros.to(real))
    return of_real + of_fake + F.binary_cross_entropy(model["discriminator"](fake).view(-1), ones.to(real))


def dp_cifar10() -> Case:
    """ResNet-18 by gradients of each sample (torch.func), clipped; the noise is left to the optimizer."""
    import torchvision

    model = torchvision.models.resnet18(num_classes=10, norm_layer=lambda c: nn.GroupNorm(min(c, 32), c)).train()

    def step(model: nn.Module, batch: Any) -> Tensor:
        params = dict(model.named_parameters())

        def loss(params: Any, image: Tensor, label: Tensor) -> Tensor:
            return F.cross_entropy(torch.func.functional_call(model, params, (image[None],)), label[None])

        gradients = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(params, batch["image"], batch["label"])
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
        factor = (1 / (norms + 1e-6)).clamp(max=1)
        return sum(
            (torch.einsum("i,i...", factor, g.detach()).mul(p)).sum()
            for g, p in zip(gradients.values(), params.values(), strict=True)
        )

    return Case(model, step, {"image": images(32), "label": classes(10)})


def lennard_jones() -> Case:
    """Energies and forces, which are derivatives by vmap and jacrev."""
    sizes = (1, 16, 16, 16, 16)
    layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(16, 1))
    distances = torch.outer(torch.linspace(0.5, 1, ROWS), torch.tensor([1.0, 0, 0]))
    batch = {"drs": distances, "energies": torch.randn(ROWS, 1), "forces": torch.randn(ROWS, 3)}

    def step(model: nn.Module, batch: Any) -> Tensor:
        drs = batch["drs"]
        norms = torch.linalg.norm(drs, dim=1).reshape(-1, 1)
        derivatives = torch.func.vmap(torch.func.jacrev(model))(norms).squeeze(-1)
        forces = -derivatives * drs / norms
        return F.mse_loss(batch["energies"], model(norms)) + 0.01 * F.mse_loss(batch["forces"], forces) / 3

    return Case(model.train(), step, batch)


def llama(load: Load) -> Case:
    """Llama as Meta published it, with a cache in each layer; the next token."""
    part = load("llama.model")
    model = part.Transformer(part.ModelArgs(
        dim=32, n_layers=4, n_heads=4, vocab_size=100, multiple_of=16, max_batch_size=ROWS, max_seq_len=32,
        device="cpu",
    ))  # fmt: skip
    return Case(
        model.train(), lambda m, b: F.cross_entropy(m(b["tokens"], 0), b["next"]),
        {"tokens": classes(100, ROWS, 16), "next": classes(100)},
    )  # fmt: skip


def nanogpt(load: Load) -> Case:
    """nanoGPT with dropout, on the next token."""
    part = load("nanogpt.model")
    model = part.GPT(part.GPTConfig(block_size=32, vocab_size=100, n_layer=12, n_head=4, n_embd=32, dropout=0.1))

    def step(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())

    return Case(model.train(), step, {"x": classes(100, ROWS, 1), "y": classes(100, ROWS, 1)})


def phlippe(folder: Path, name: str) -> Case:
    """The classifiers for CIFAR-10."""
    script = definitions(
        folder / f"torchbenchmark/models/{name}/__init__.py", BenchmarkModel=object, COMPUTER_VISION=MagicMock()
    )
    if name == "phlippe_densenet":
        model = script.DenseNet(num_classes=10, num_layers=[2, 2, 2], bn_size=2, growth_rate=8, act_fn_name="relu")
    else:
        model = script.ResNetModel(num_classes=10, c_hidden=[8, 16, 32], num_blocks=[2, 2, 2], act_fn_name="relu")
    return Case(model.train(), cross_entropy, {"image": images(32), "label": classes(10)})


def unet(load: Load) -> Case:
    """pytorch_unet with its Dice loss, which has a sum over the batch."""
    part, dice = load("pytorch_unet.pytorch_unet.unet"), load("pytorch_unet.pytorch_unet.utils.dice_score")
    model = part.UNet(n_channels=3, n_classes=2, bilinear=True).train()

    def step(model: Any, batch: Any) -> Tensor:
        found, wanted = model(batch["image"]), batch["mask"]
        one_hot = F.one_hot(wanted, model.n_classes).permute(0, 3, 1, 2).float()
        return F.cross_entropy(found, wanted) + dice.dice_loss(
            F.softmax(found, dim=1).float(), one_hot, multiclass=True
        )

    return Case(model, step, {"image": images(32), "mask": classes(2, ROWS, 32, 32)})


def multimodal_clip() -> Case:
    """CLIP of torchmultimodal with its contrastive loss."""
    from torchmultimodal.models.clip.image_encoder import CLIPViTEncoder
    from torchmultimodal.models.clip.model import CLIP
    from torchmultimodal.models.clip.text_encoder import CLIPTextEncoder
    from torchmultimodal.modules.losses.contrastive_loss_with_temperature import ContrastiveLossWithTemperature

    vision = CLIPViTEncoder(embedding_dim=16, heads=4, layers=3, patch_size=8, image_size=32, width=32)
    text = CLIPTextEncoder(embedding_dim=16, context_length=16, vocab_size=100, width=32, heads=4, layers=3)
    model = nn.ModuleDict({"clip": CLIP(vision, text), "loss": ContrastiveLossWithTemperature()})

    def step(model: Any, batch: Any) -> Tensor:
        return model["loss"](*model["clip"](batch["image"], batch["text"]))

    return Case(model.train(), step, {"image": images(32), "text": torch.randint(1, 100, (ROWS, 16))})


def programs(folder: Path) -> Suite:
    """The models, from a checkout of TorchBench."""

    def load(name: str) -> Any:
        return package(folder, f"torchbenchmark.models.{name}")

    own = {
        "BERT_pytorch": bert, "LearningToPaint": learning_to_paint, "Super_SloMo": super_slomo,
        "cm3leon_generate": cm3leon, "llama": llama, "nanogpt": nanogpt, "pytorch_unet": unet,
    }  # fmt: skip
    found: Suite = {name: partial(build, load) for name, build in own.items()}
    found |= {
        "dcgan": partial(dcgan, folder), "functorch_dp_cifar10": dp_cifar10, "lennard_jones": lennard_jones,
        "torch_multimodal_clip": multimodal_clip,
    }  # fmt: skip
    return found | {name: partial(phlippe, folder, name) for name in ("phlippe_densenet", "phlippe_resnet")}
