"""The models of TorchBench that have code of their own there, with the training steps of that code."""

import itertools
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.resnet import BasicBlock, ResNet

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


def background_matting(load: Load) -> Case:
    """Generator and discriminator of Background_Matting; the fixed teacher is a module, too."""
    networks, losses = load("Background_Matting.networks"), load("Background_Matting.loss_functions")
    sizes = {"input_nc": (3, 3, 1, 4), "output_nc": 4, "ngf": 8, "nf_part": 8, "n_blocks1": 3, "n_blocks2": 2}
    model = nn.ModuleDict({
        "teacher": networks.ResnetConditionHR(**sizes).eval().requires_grad_(False),
        "generator": networks.ResnetConditionHR(**sizes),
        "discriminator": networks.MultiscaleDiscriminator(3, num_D=1, norm_layer=nn.InstanceNorm2d, ndf=8),
    })  # fmt: skip
    alpha, gradient, compose = losses.alpha_loss(), losses.alpha_gradient_loss(), losses.compose_loss()
    adversarial = losses.GANloss()
    batch = {key: images(64) for key in ("image", "bg", "back")} | {"seg": images(64, 1), "frames": images(64, 4)}

    def step(model: Any, batch: Any) -> Tensor:
        image, bg, inputs = batch["image"], batch["bg"], (batch["image"], batch["bg"], batch["seg"], batch["frames"])
        wanted_alpha, wanted = model["teacher"](*inputs)
        found_alpha, found = model["generator"](*inputs)
        mask, everywhere = (wanted_alpha > -0.98).float(), torch.ones_like(batch["seg"])
        al_loss = alpha(wanted_alpha, found_alpha, everywhere) + 0.5 * gradient(wanted_alpha, found_alpha, everywhere)
        fg_loss = alpha(wanted, found, mask)
        comp_loss = compose(image, found_alpha, found, bg, everywhere)
        share = (found_alpha + 1) / 2
        composed = found * share + (1 - share) * batch["back"]
        generator_loss = adversarial(model["discriminator"](composed), label_type=True)
        fake = adversarial(model["discriminator"](composed.detach()), label_type=False)
        real = adversarial(model["discriminator"](image), label_type=True)
        return generator_loss + 0.05 * (comp_loss + al_loss + fg_loss) + 0.5 * (fake + real)

    model["generator"].train()
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


def dcgan(load: Load, folder: Path) -> Case:
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


def demucs(load: Load) -> Case:
    """Demucs with its augmentation, which mixes pairs of samples."""
    part, augment, utils = load("demucs.demucs.model"), load("demucs.demucs.augment"), load("demucs.demucs.utils")
    model = nn.ModuleDict({
        "demucs": part.Demucs(channels=4, depth=3),
        "augment": nn.Sequential(augment.FlipSign(), augment.FlipChannels(), augment.Shift(64), augment.Remix(2)),
    })  # fmt: skip

    def step(model: Any, batch: Any) -> Tensor:
        sources = model["augment"](batch[:, 1:])
        estimates = model["demucs"](sources.sum(dim=1))
        return F.l1_loss(estimates, utils.center_trim(sources, estimates))

    return Case(model.train(), step, torch.rand(ROWS, 5, 2, 1024))


def dlrm(load: Load) -> Case:
    """DLRM with four tables and three indices a lookup; dense gradients, as optimizers of stages need them."""
    part = load("dlrm.dlrm_s_pytorch")
    np.random.seed(0)
    model = part.DLRM_Net(
        8, np.array([50] * 4), np.array([16, 16, 8]), np.array([18, 16, 1]), "dot", sigmoid_top=1,
    )  # fmt: skip
    batch = {
        "dense": torch.rand(ROWS, 16), "offsets": torch.arange(0, 3 * ROWS, 3).repeat(4, 1),
        "indices": torch.randint(0, 50, (4, 3 * ROWS)), "target": torch.rand(ROWS, 1),
    }  # fmt: skip
    for table in model.emb_l:
        table.sparse = False

    def step(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch["dense"], batch["offsets"], batch["indices"]), batch["target"])

    return Case(model.train(), step, batch, {"microbatches": 1})


def doctr_detection() -> Case:
    """The detector of doctr, which makes its targets from boxes of words in numpy."""
    from doctr.models import db_resnet50

    model = db_resnet50(pretrained=False, pretrained_backbone=False).train()
    words = torch.tensor([[[0.1, 0.1, 0.2 + 0.1 * i, 0.5], [0.2, 0.6, 0.9, 0.8]] for i in range(ROWS)])

    def step(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["image"], [{"words": boxes.numpy()} for boxes in batch["words"]])["loss"]

    return Case(model, step, {"image": torch.rand(ROWS, 3, 64, 64), "words": words})


def doctr_recognition() -> Case:
    """The recogniser of doctr, with words as texts."""
    from doctr.models import crnn_vgg16_bn

    model = crnn_vgg16_bn(pretrained=False, pretrained_backbone=False).train()
    batch = {"image": torch.rand(ROWS, 3, 32, 128), "words": ["cat", "dogs", "a", "pipe", "pan", "to", "stage", "no"]}
    return Case(model, lambda m, b: m(b["image"], b["words"])["loss"], batch, {"microbatches": 1})


def drq(load: Load) -> Case:
    """The critic's loss of DrQ, from target values that are given, and the actor's."""
    part = load("drq.drq")
    model = nn.ModuleDict({
        "actor": part.Actor(((9, 84, 84), 16), (1,), 32, 2, [-10, 2]),
        "critic": part.Critic(((9, 84, 84), 16), (1,), 32, 2),
    })  # fmt: skip
    batch = {"obs": torch.rand(ROWS, 9, 84, 84) * 255, "action": torch.rand(ROWS, 1), "target": torch.rand(ROWS, 1)}

    def step(model: Any, batch: Any) -> Tensor:
        first, second = model["critic"](batch["obs"], batch["action"])
        critic_loss = F.mse_loss(first, batch["target"]) + F.mse_loss(second, batch["target"])
        dist = model["actor"](batch["obs"], detach_encoder=True)
        action = dist.rsample()
        log_prob = dist.log_prob(action).sum(-1, keepdim=True)
        value = torch.min(*model["critic"](batch["obs"], action, detach_encoder=True))
        return critic_loss + (0.1 * log_prob - value).mean()

    return Case(model.train(), step, batch)


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


def maml_net(momentum: float | None = 0.1, tracked: bool = False) -> nn.Sequential:
    """The network of the three MAML models."""
    blocks: list[nn.Module] = []
    for channels in (1, 16, 16):
        norm = nn.BatchNorm2d(16, momentum=momentum, affine=True, track_running_stats=tracked)
        blocks += [nn.Conv2d(channels, 16, 3), norm, nn.ReLU(inplace=True), nn.MaxPool2d(2, 2)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(16, 5))


def tasks() -> dict[str, Tensor]:
    """Tasks with five examples to adapt to and ten to judge by."""
    return {
        "x": torch.randn(ROWS, 5, 1, 28, 28), "y": classes(5, ROWS, 5), "x_query": torch.randn(ROWS, 10, 1, 28, 28),
        "y_query": classes(5, ROWS, 10),
    }  # fmt: skip


def functorch_maml() -> Case:
    """Two inner steps by torch.func.grad, all tasks at once by vmap."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        params = dict(model.named_parameters())

        def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(torch.func.functional_call(model, params, (x,)), y)

        def of_task(x: Tensor, y: Tensor, x_query: Tensor, y_query: Tensor) -> Tensor:
            new = params
            for _ in range(2):
                gradients = torch.func.grad(loss)(new, x, y)
                new = {name: p - 0.1 * gradients[name] for name, p in new.items()}
            return loss(new, x_query, y_query)

        return torch.func.vmap(of_task)(batch["x"], batch["y"], batch["x_query"], batch["y_query"]).mean()

    return Case(maml_net().train(), step, tasks())


def maml(load: Load) -> Case:
    """Two inner steps of the Learner of maml by torch.autograd.grad, task after task."""
    learner = load("maml.learner").Learner([
        ("conv2d", [16, 1, 3, 3, 2, 0]), ("relu", [True]), ("bn", [16]), ("flatten", []), ("linear", [5, 16 * 13 * 13]),
    ], 1, 28)  # fmt: skip

    def step(model: Any, batch: Any) -> Tensor:
        losses = []
        for x, y, x_query, y_query in zip(batch["x"], batch["y"], batch["x_query"], batch["y_query"], strict=True):
            weights = list(model.parameters())
            for _ in range(2):
                loss = F.cross_entropy(model(x, weights, bn_training=True), y)
                weights = [
                    w - 0.4 * g
                    for g, w in zip(torch.autograd.grad(loss, weights, create_graph=True), weights, strict=True)
                ]
            losses.append(F.cross_entropy(model(x_query, weights, bn_training=True), y_query))
        return torch.stack(losses).mean()

    return Case(learner.train(), step, tasks())


def maml_omniglot() -> Case:
    """Two inner steps by the package higher, task after task."""
    import higher

    def step(model: nn.Module, batch: Any) -> Tensor:
        inner, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for x, y, x_query, y_query in zip(batch["x"], batch["y"], batch["x_query"], batch["y_query"], strict=True):
            with higher.innerloop_ctx(model, inner, copy_initial_weights=False) as (net, update):
                for _ in range(2):
                    update.step(F.cross_entropy(net(x), y))
                losses.append(F.cross_entropy(net(x_query), y_query))
        return torch.stack(losses).mean()

    return Case(maml_net(1.0, True).train(), step, tasks())


def gnn(kind: str) -> Case:
    """A network on one graph: there is no batch to cut."""
    import torch_geometric.nn

    model = getattr(torch_geometric.nn, kind)(16, 16, num_layers=3).train()
    batch = {"x": torch.randn(64, 16), "edge_index": torch.randint(64, (2, 256)), "weight": torch.randn(64, 16)}
    return Case(model, lambda m, b: (m(b["x"], b["edge_index"]) * b["weight"]).mean(), batch, {"microbatches": 1})


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


def moco(load: Load) -> Case:
    """MoCo with ResNet-18 and a group of one rank."""
    import tempfile

    import torch.distributed as dist
    import torchvision

    if not dist.is_initialized():
        store = dist.FileStore(tempfile.mktemp(), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = load("moco.moco.builder").MoCo(torchvision.models.resnet18, 16, 64)

    def step(model: nn.Module, batch: Any) -> Tensor:
        output, target = model(im_q=batch["query"], im_k=batch["key"])
        return F.cross_entropy(output, target)

    return Case(model.train(), step, {"query": images(32), "key": images(32)})


def nanogpt(load: Load) -> Case:
    """nanoGPT with dropout, on the next token."""
    part = load("nanogpt.model")
    model = part.GPT(part.GPTConfig(block_size=32, vocab_size=100, n_layer=12, n_head=4, n_embd=32, dropout=0.1))

    def step(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())

    return Case(model.train(), step, {"x": classes(100, ROWS, 1), "y": classes(100, ROWS, 1)})


def recommender(load: Load) -> Case:
    """nvidia_deeprecommender, whose loss is a mean over the ratings that there are."""
    part = load("nvidia_deeprecommender.reco_encoder.model.model")
    model = part.AutoEncoder([200, 32, 32, 64], is_constrained=False, dp_drop_prob=0.8, last_layer_activations=False)
    ratings = torch.randint(0, 6, (ROWS, 200)).float() * (torch.rand(ROWS, 200) < 0.3)

    def step(model: nn.Module, batch: Any) -> Any:
        total, count = part.MSEloss(model(batch), batch)
        return total / count

    return Case(model.train(), step, ratings)


class AddingBlock(BasicBlock):
    """A block of ResNet that does not add in place."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


def opacus_cifar10() -> Case:
    """ResNet-18 that opacus wraps for gradients of each sample; its hooks allow no addition in place."""
    from opacus import GradSampleModule
    from opacus.validators import ModuleValidator

    fixed = ModuleValidator.fix(ResNet(AddingBlock, [2, 2, 2, 2], num_classes=10))
    for module in fixed.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    return Case(GradSampleModule(fixed).train(), cross_entropy, {"image": images(32), "label": classes(10)})


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


def cycle_gan(load: Load) -> Case:
    """Both generators and both discriminators of CycleGAN, without its pool of earlier images."""
    networks = load("pytorch_CycleGAN_and_pix2pix.models.networks")
    model = nn.ModuleDict({
        **{f"G_{s}": networks.define_G(3, 3, 8, "resnet_6blocks", "instance", True) for s in "AB"},
        **{f"D_{s}": networks.define_D(3, 8, "basic", 3, "instance") for s in "AB"},
    })  # fmt: skip
    gan = networks.GANLoss("lsgan")

    def step(model: Any, batch: Any) -> Tensor:
        real_a, real_b = batch["A"], batch["B"]
        fake_b, fake_a = model["G_A"](real_a), model["G_B"](real_b)
        cycle = F.l1_loss(model["G_B"](fake_b), real_a) + F.l1_loss(model["G_A"](fake_a), real_b)
        same = F.l1_loss(model["G_A"](real_b), real_b) + F.l1_loss(model["G_B"](real_a), real_a)
        loss = gan(model["D_A"](fake_b), True) + gan(model["D_B"](fake_a), True) + 10 * cycle + 5 * same
        for side, real, fake in (("D_A", real_b, fake_b), ("D_B", real_a, fake_a)):
            loss = loss + 0.5 * (gan(model[side](real), True) + gan(model[side](fake.detach()), False))
        return loss

    return Case(model.train(), step, {"A": images(64, rows=4), "B": images(64, rows=4)})


def stargan(load: Load) -> Case:
    """The discriminator's loss of StarGAN, with its gradient penalty, and the generator's."""
    part = load("pytorch_stargan.model")
    model = nn.ModuleDict({"G": part.Generator(8, 5, 2), "D": part.Discriminator(32, 8, 5, 3)})
    batch = {"real": images(32), "target": torch.rand(ROWS, 5).round(), "origin": torch.rand(ROWS, 5).round()}

    def step(model: Any, batch: Any) -> Tensor:
        real = batch["real"]
        of_real, found = model["D"](real)
        fake = model["G"](real, batch["target"])
        of_fake, _ = model["D"](fake.detach())
        mix = torch.rand(len(real), 1, 1, 1)
        between = (mix * real + (1 - mix) * fake.detach()).requires_grad_(True)
        of_between, _ = model["D"](between)
        (slope,) = torch.autograd.grad(of_between, between, torch.ones_like(of_between), create_graph=True)
        penalty = ((slope.flatten(1).pow(2).sum(1).sqrt() - 1) ** 2).mean()
        d_loss = (
            of_fake.mean() - of_real.mean() + F.binary_cross_entropy_with_logits(found, batch["origin"]) + 10 * penalty
        )
        of_fake, found = model["D"](fake)
        back = (real - model["G"](fake, batch["origin"])).abs().mean()
        return d_loss - of_fake.mean() + 10 * back + F.binary_cross_entropy_with_logits(found, batch["target"])

    return Case(model.train(), step, batch)


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


def sam(load: Load) -> Case:
    """SAM with a box for each image, trained towards masks as fine-tuning scripts do."""
    build, encoder = load("sam.build_sam"), load("sam.image_encoder")
    prompts, decoder, two_way, whole = (
        load("sam.prompt_encoder"),
        load("sam.mask_decoder"),
        load("sam.transformer"),
        load("sam.sam"),
    )
    del build
    model = whole.Sam(
        image_encoder=encoder.ImageEncoderViT(
            depth=2, embed_dim=32, img_size=64, mlp_ratio=4, norm_layer=partial(nn.LayerNorm, eps=1e-6), num_heads=4,
            patch_size=16, qkv_bias=True, use_rel_pos=True, global_attn_indexes=(1,), window_size=2, out_chans=32,
        ),
        prompt_encoder=prompts.PromptEncoder(
            embed_dim=32, image_embedding_size=(4, 4), input_image_size=(64, 64), mask_in_chans=16,
        ),
        mask_decoder=decoder.MaskDecoder(
            num_multimask_outputs=3, transformer=two_way.TwoWayTransformer(depth=2, embedding_dim=32, mlp_dim=64,
            num_heads=4),
            transformer_dim=32, iou_head_depth=3, iou_head_hidden_dim=32,
        ),
        pixel_mean=[123.675, 116.28, 103.53], pixel_std=[58.395, 57.12, 57.375],
    )  # fmt: skip
    corner = torch.rand(ROWS, 2) * 30
    batch = {"image": torch.rand(ROWS, 3, 64, 64) * 255, "box": torch.cat([corner, corner + 20], 1),
             "mask": torch.rand(ROWS, 16, 16).round()}  # fmt: skip

    def step(model: Any, batch: Any) -> Tensor:
        embeddings = model.image_encoder(torch.stack([model.preprocess(image) for image in batch["image"]]))
        losses = []
        for embedding, box, mask in zip(embeddings, batch["box"], batch["mask"], strict=True):
            sparse, dense = model.prompt_encoder(points=None, boxes=box[None], masks=None)
            found, _ = model.mask_decoder(
                image_embeddings=embedding[None], image_pe=model.prompt_encoder.get_dense_pe(),
                sparse_prompt_embeddings=sparse, dense_prompt_embeddings=dense, multimask_output=False,
            )  # fmt: skip
            losses.append(F.binary_cross_entropy_with_logits(found[0, 0], mask))
        return torch.stack(losses).mean()

    return Case(model.train(), step, batch)


def actor_critic(load: Load) -> Case:
    """Soft actor-critic: the losses of critics, actor and temperature, with target networks."""
    sac = load("soft_actor_critic.sac")
    agent, target = (sac.SACAgent(3, 1, -5, 2, "cpu", hidden_size=32) for _ in range(2))
    model = nn.ModuleDict({
        "actor": agent.actor, "critic1": agent.critic1, "critic2": agent.critic2,
        "target1": target.critic1.requires_grad_(False), "target2": target.critic2.requires_grad_(False),
    })  # fmt: skip
    model.register_parameter("log_alpha", nn.Parameter(torch.tensor([math.log(0.1)])))
    batch = {
        "state": torch.randn(ROWS, 3), "action": torch.rand(ROWS, 1), "reward": torch.randn(ROWS, 1),
        "next": torch.randn(ROWS, 3), "done": torch.zeros(ROWS, 1),
    }  # fmt: skip

    def step(model: Any, batch: Any) -> Tensor:
        alpha = model.log_alpha.exp()
        with torch.no_grad():
            dist = model["actor"](batch["next"])
            action = dist.rsample()
            log_prob = dist.log_prob(action).sum(-1, keepdim=True)
            value = torch.min(model["target1"](batch["next"], action), model["target2"](batch["next"], action))
            wanted = batch["reward"] + 0.99 * (1 - batch["done"]) * (value - alpha * log_prob)
        errors = [wanted - model[name](batch["state"], batch["action"]) for name in ("critic1", "critic2")]
        critic_loss = (0.5 * (errors[0] ** 2 + errors[1] ** 2)).mean()
        dist = model["actor"](batch["state"])
        action = dist.rsample()
        log_prob = dist.log_prob(action).sum(-1, keepdim=True)
        value = torch.min(model["critic1"](batch["state"], action), model["critic2"](batch["state"], action))
        actor_loss = -(value - alpha.detach() * log_prob).mean()
        return critic_loss + actor_loss - (alpha * (log_prob - 1).detach()).mean()

    return Case(model.train(), step, batch)


def speech_transformer(load: Load) -> Case:
    """speech_transformer on padded utterances; its loss is a mean over the characters that there are."""
    base = "speech_transformer.speech_transformer.transformer"
    encoder, decoder = load(f"{base}.encoder"), load(f"{base}.decoder")
    model = load(f"{base}.transformer").Transformer(
        encoder.Encoder(20, 3, 4, 8, 8, 32, 64, dropout=0.1, pe_maxlen=100),
        decoder.Decoder(0, 1, 50, 32, 3, 4, 8, 8, 32, 64, dropout=0.1, pe_maxlen=100),
    )
    performance = load(f"{base}.loss").cal_performance
    targets = torch.randint(2, 50, (ROWS, 9))
    targets[::2, -2:] = -1
    batch = {"input": torch.randn(ROWS, 24, 20), "lengths": torch.tensor([24, 20] * 4), "target": targets}

    def step(model: nn.Module, batch: Any) -> Tensor:
        found, wanted = model(batch["input"], batch["lengths"], batch["target"])
        return performance(found, wanted, smoothing=0.1)[0]

    return Case(model.train(), step, batch)


def tacotron2(load: Load) -> Case:
    """Tacotron 2 on padded texts."""
    part, loss = load("tacotron2.model"), load("tacotron2.loss_function").Tacotron2Loss()
    model = part.Tacotron2(SimpleNamespace(
        mask_padding=True, fp16_run=False, n_mel_channels=8, n_frames_per_step=1, n_symbols=40,
        symbols_embedding_dim=16,
        encoder_kernel_size=5, encoder_n_convolutions=2, encoder_embedding_dim=16, decoder_rnn_dim=16, prenet_dim=16,
        max_decoder_steps=20, gate_threshold=0.5, p_attention_dropout=0.1, p_decoder_dropout=0.1, attention_rnn_dim=16,
        attention_dim=16, attention_location_n_filters=4, attention_location_kernel_size=5, postnet_embedding_dim=16,
        postnet_kernel_size=5, postnet_n_convolutions=3,
    ))  # fmt: skip
    batch = {
        "text": torch.randint(0, 40, (ROWS, 12)), "lengths": torch.tensor([12, 12, 12, 10, 12, 9, 12, 8]),
        "mel": torch.randn(ROWS, 8, 10), "gate": torch.rand(ROWS, 10).round(),
        "mel_lengths": torch.tensor([10, 10, 10, 9, 10, 8, 10, 7]),
    }  # fmt: skip
    batch["lengths"][::2] = 12

    def step(model: nn.Module, batch: Any) -> Tensor:
        longest = torch.max(batch["lengths"].data).item()
        found = model((batch["text"], batch["lengths"], batch["mel"], longest, batch["mel_lengths"]))
        return loss(found, (batch["mel"], batch["gate"]))

    return Case(model.train(), step, batch)


def efficientdet() -> Case:
    """EfficientDet-D0 with the loss and anchors of effdet."""
    from effdet import EfficientDet, get_efficientdet_config
    from effdet.bench import DetBenchTrain

    config = get_efficientdet_config("tf_efficientdet_d0")
    config.image_size, config.num_classes = (128, 128), 5
    model = DetBenchTrain(EfficientDet(config, pretrained_backbone=False), config).train()
    corners = torch.rand(ROWS, 2, 2) * 60
    batch = {
        "image": images(128), "bbox": torch.cat([corners, corners + 50], 2), "cls": torch.randint(1, 6, (ROWS,
        2)).float(),
    }  # fmt: skip
    return Case(
        model, lambda m, b: m(b["image"], {"bbox": b["bbox"], "cls": b["cls"]})["loss"], batch
    )  # fmt: skip


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


def tts_angular(load: Load) -> Case:
    """The speaker encoder of tts_angular, with four speakers of two utterances in a microbatch's rows."""
    part = load("tts_angular.model")
    model = nn.ModuleDict({"encoder": part.SpeakerEncoder(8, 16, 24, 3), "loss": part.AngleProtoLoss()})
    batch = torch.randn(ROWS, 3, 12, 8)

    def step(model: Any, batch: Any) -> Tensor:
        speakers, utterances = batch.shape[:2]
        return model["loss"](model["encoder"](batch.flatten(0, 1)).view(speakers, utterances, -1))

    return Case(model.train(), step, batch)


def yolo(load: Load, folder: Path) -> Case:
    """YOLOv3-tiny with its loss; targets are rows of (image, class, box), as the loader collates them."""
    models, utils = load("yolov3.yolo_models"), load("yolov3.yolo_utils.utils")
    model = models.Darknet(str(folder / "torchbenchmark/models/yolov3/cfg/yolov3-tiny.cfg"), (64, 64))
    model.nc, model.gr = 80, 1.0
    model.hyp = {"giou": 3.54, "cls": 37.4, "cls_pw": 1.0, "obj": 64.3, "obj_pw": 1.0, "iou_t": 0.2, "fl_gamma": 0.0}
    targets = torch.cat([torch.randint(0, 80, (ROWS, 2, 1)), torch.rand(ROWS, 2, 4) * 0.4 + 0.3], 2)
    batch = [
        {"image": image, "targets": target} for image, target in zip(torch.rand(ROWS, 3, 64, 64), targets, strict=True)
    ]

    def step(model: Any, batch: Any) -> Tensor:
        numbered = [F.pad(sample["targets"], (1, 0), value=i) for i, sample in enumerate(batch)]
        found = model(torch.stack([sample["image"] for sample in batch]))
        return utils.compute_loss(found, torch.cat(numbered), model)[0]

    return Case(model.train(), step, batch, {"batch_dims": "samples"})


def programs(folder: Path) -> Suite:
    """The models, from a checkout of TorchBench."""

    def load(name: str) -> Any:
        return package(folder, f"torchbenchmark.models.{name}")

    own = {
        "BERT_pytorch": bert, "Background_Matting": background_matting, "LearningToPaint": learning_to_paint,
        "Super_SloMo": super_slomo, "cm3leon_generate": cm3leon, "demucs": demucs, "dlrm": dlrm, "drq": drq,
        "llama": llama, "maml": maml,
        "moco": moco, "nanogpt": nanogpt, "nvidia_deeprecommender": recommender,
        "pytorch_CycleGAN_and_pix2pix": cycle_gan,
        "pytorch_stargan": stargan, "pytorch_unet": unet, "sam": sam, "soft_actor_critic": actor_critic,
        "speech_transformer": speech_transformer, "tacotron2": tacotron2, "tts_angular": tts_angular,
    }  # fmt: skip
    found: Suite = {name: partial(build, load) for name, build in own.items()}
    found |= {
        "dcgan": partial(dcgan, load, folder), "yolov3": partial(yolo, load, folder),
        "doctr_det_predictor": doctr_detection, "doctr_reco_predictor": doctr_recognition,
        "functorch_dp_cifar10": dp_cifar10, "functorch_maml_omniglot": functorch_maml, "maml_omniglot": maml_omniglot,
        "lennard_jones": lennard_jones, "opacus_cifar10": opacus_cifar10, "timm_efficientdet": efficientdet,
        "torch_multimodal_clip": multimodal_clip,
    }  # fmt: skip
    found |= {name: partial(phlippe, folder, name) for name in ("phlippe_densenet", "phlippe_resnet")}
    kinds = {"edgecnn": "EdgeCNN", "gcn": "GCN", "gin": "GIN", "sage": "GraphSAGE"}
    return found | {f"basic_gnn_{name}": partial(gnn, kind) for name, kind in kinds.items()}
