"""Networks and losses as users write them."""
# ruff: noqa: UP031, RUF059 -- as users write

import copy
import math
from collections import OrderedDict
from typing import NamedTuple

import panpipe
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


def fit(model, step, batches, microbatches=4, optimizer=torch.optim.AdamW, **options):
    pipe = panpipe.pipeline(model, step, batches[0], optimizer=optimizer, microbatches=microbatches, **options)
    for batch in batches:
        pipe.step(batch)
    return pipe


def classes(count=4, rows=8, *shape):
    return [{"x": torch.randn(rows, *(shape or (6,))), "y": torch.randint(3, (rows,))} for _ in range(count)]


def sentences(count=4, rows=8, length=5, words=12):
    return [dict(zip("xy", torch.randint(words, (2, rows, length)), strict=True)) for _ in range(count)]


def classify(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def next_word(model, batch):
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


# %% lstm_that_reads_the_batch | fast, few
class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(6, 8, batch_first=True)
        self.dropout, self.head = nn.Dropout(0.0), nn.Linear(8, 3)

    def forward(self, x):
        output, _ = self.rnn(x)
        return self.head(self.dropout(output[:, -1]))


model = Rows()
pipe = fit(model, classify, classes(4, 8, 5, 6))


# %% gru_that_reads_the_batch
class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(6, 8, num_layers=2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        _, hidden = self.gru(x)
        return self.head(hidden[-1])


model = Rows()
pipe = fit(model, classify, classes(4, 8, 5, 6))


# %% bidirectional_lstm_over_words | few
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.lstm = nn.LSTM(6, 4, bidirectional=True, batch_first=True)
        self.head = nn.Linear(8, 12)

    def forward(self, x):
        return self.head(self.lstm(self.embed(x))[0])


model = Tagger()
pipe = fit(model, next_word, sentences())


# %% cell_with_a_state_of_the_batch_size
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = torch.zeros(len(x), 8)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.head(h)


model = Recurrent()
pipe = fit(model, classify, classes(4, 8, 5, 6))


# %% batch_norm_net
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + x)


model = nn.Sequential(
    nn.Conv2d(3, 4, 3, stride=2), Block(4), Block(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
)
pipe = fit(model, classify, classes(3, 8, 3, 8, 8), microbatches=2)


# %% group_norm_in_channels_last | fast, few
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(4, 8),
    nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
).to(memory_format=torch.channels_last)  # fmt: skip


def step(model, batch):
    return F.cross_entropy(model(batch["x"].contiguous(memory_format=torch.channels_last)), batch["y"])


pipe = fit(model, step, classes(3, 8, 3, 8, 8))


# %% running_mean_and_targets_of_one_column | fast, may_warn=relates
class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros(()))
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.count += 1
                self.mean += (x.mean(0) - self.mean) / self.count
        return self.net(x - self.mean)


def step(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


model = Normalised()
pipe = fit(model, step, [{"x": torch.randn(8, 6), "y": torch.randn(8, 1)} for _ in range(4)])


# %% running_mean_in_a_plain_attribute | fast, may_warn=relates
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.ones(6)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x):
        self.scale = 0.9 * self.scale + 0.1 * x.detach().abs().mean(0)
        return self.net(x / self.scale)


model = Scaled()
pipe = fit(model, classify, classes())
for batch in classes(1):
    model.eval()
    val = pipe.evaluate(batch)


# %% spectral_norm_by_hooks | fast
# Until the first forward its attribute `weight` has the memory of the parameter `weight_orig`.
norm = nn.utils.spectral_norm
model = nn.Sequential(norm(nn.Linear(6, 8)), nn.LeakyReLU(0.2), norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 3))
pipe = fit(model, classify, classes())
model.eval()
val = pipe.evaluate(classes(1)[0])


# %% computed_attribute_names
class Layers(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.depth = depth
        for k in range(depth):
            setattr(self, f"l{k}", nn.Linear(6, 6))
            self.add_module("norm_" + str(k), nn.LayerNorm(6))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for k in range(self.depth):
            x = getattr(self, "norm_%d" % k)(torch.relu(getattr(self, f"l{k}")(x)))
        return self.head(x)


model = Layers()
pipe = fit(model, classify, classes())
for batch in classes(2):
    loss = pipe.step(batch)
    l0, k = loss.item(), 1


# %% blocks_in_a_dict_by_name
class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleDict({"first": nn.Linear(6, 8), "second": nn.Linear(8, 8)})
        self.acts = nn.ModuleDict([["relu", nn.ReLU()], ["gelu", nn.GELU()]])
        self.order, self.act, self.head = ["first", "second"], "gelu", nn.Linear(8, 3)

    def forward(self, x):
        for name in self.order:
            x = self.acts[self.act](self.blocks[name](x))
        return self.head(x)


model = Routed()
pipe = fit(model, classify, classes())


# %% activation_by_its_name
class Net(nn.Module):
    def __init__(self, activation="silu"):
        super().__init__()
        self.a, self.b, self.activation = nn.Linear(6, 8), nn.Linear(8, 3), activation

    def forward(self, x):
        return self.b(getattr(F, self.activation)(self.a(x)))


model = Net()
pipe = fit(model, classify, classes())


# %% train_and_eval_switches | fast, keyed
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 8), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        h = self.layers(x)
        return self.head(h if self.training else h * 2)


model = Net()
batches = classes(6)
pipe = panpipe.pipeline(model, classify, batches[0], optimizer=torch.optim.AdamW, microbatches=4)
for i, batch in enumerate(batches):
    model.train()
    loss = pipe.step(batch)
    if i % 2:
        model.eval()
        loss = pipe.evaluate(batch)


# %% dropout_everywhere | keyed
class Net(nn.Module):
    def __init__(self, p=0.2):
        super().__init__()
        self.p, self.embed = p, nn.Embedding(12, 8)
        self.a, self.b, self.drop = nn.Linear(8, 8), nn.Linear(8, 12), nn.Dropout1d(0.1)

    def forward(self, x):
        h = F.dropout(self.embed(x), self.p, self.training)
        return self.b(F.alpha_dropout(torch.selu(self.a(self.drop(h))), 0.1, self.training))


model = Net()
pipe = fit(model, next_word, sentences())


# %% variational_autoencoder | keyed
class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(6, 8), nn.Linear(8, 2), nn.Linear(8, 2)
        self.fc3, self.fc4 = nn.Linear(2, 8), nn.Linear(8, 6)

    def forward(self, x):
        h = F.relu(self.fc1(x))
        mu, logvar = self.fc21(h), self.fc22(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


def step(model, batch):
    recon_x, mu, logvar = model(batch)
    bce = F.binary_cross_entropy(recon_x, batch, reduction="sum") / len(batch)
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp()) / len(batch)
    return bce + kld


model = VAE()
pipe = fit(model, step, [torch.rand(8, 6) for _ in range(4)])


# %% denoising_by_a_drawn_time | keyed
class Denoiser(nn.Module):
    def __init__(self, steps=10):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 16), nn.SiLU(), nn.Linear(16, 6))
        self.register_buffer("alphas", torch.cumprod(1 - torch.linspace(1e-4, 0.02, steps), 0))

    def forward(self, x, t):
        return self.net(torch.cat([x, t[:, None] / len(self.alphas)], -1))


def step(model, x):
    t = torch.randint(0, len(model.alphas), (len(x),))
    noise, a = torch.randn_like(x), model.alphas[t][:, None]
    return F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)


model = Denoiser()
pipe = fit(model, step, [torch.randn(8, 6) for _ in range(4)])


# %% tied_weights_of_a_language_model
class LanguageModel(nn.Module):
    def __init__(self, words=12, width=8):
        super().__init__()
        self.embed, self.pos = nn.Embedding(words, width), nn.Parameter(torch.zeros(16, width))
        layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.encoder(self.embed(x) + self.pos[: x.shape[1]], mask=mask))


model = LanguageModel()
pipe = fit(model, next_word, sentences(), update=panpipe.Update(clip_norm=1.0))


# %% gpt_from_scratch
class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.c_attn, self.c_proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("bias", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
        att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf")).softmax(-1)
        return self.c_proj((att @ v).transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(width), Attention(width, 2), nn.LayerNorm(width)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)})

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp.c_proj(F.gelu(self.mlp.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(12, 8), nn.Embedding(16, 8)
        self.h, self.lm_head = nn.ModuleList([Block(8) for _ in range(2)]), nn.Linear(8, 12, bias=False)

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(x)
        loss = None if targets is None else F.cross_entropy(logits.view(-1, 12), targets.view(-1), ignore_index=-1)
        return logits, loss


def step(model, batch):
    logits, loss = model(batch["x"], batch["y"])
    return loss


model = GPT()
pipe = fit(model, step, sentences())


# %% hand_written_lora | fast
class LoRALinear(nn.Module):
    def __init__(self, base, r=2, alpha=4):
        super().__init__()
        self.base, self.scaling = base, alpha / r
        base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(r, base.in_features) * 0.1)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))

    def forward(self, x):
        return self.base(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling


def inject(module):
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, LoRALinear(child))
        else:
            inject(child)


model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 3))
inject(model)
pipe = fit(model, classify, classes())


# %% frozen_backbone
class Classifier(nn.Module):
    def __init__(self, backbone):
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(8, 3)
        for p in self.backbone.parameters():
            p.requires_grad = False

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x):
        with torch.no_grad():
            features = self.backbone(x)
        return self.head(features)


model = Classifier(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8)))
model.train()
pipe = fit(model, classify, classes())

# %% frozen_layers_that_are_unfrozen_later | changes=1
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
batches = classes(4)
model[0].requires_grad_(False)
pipe = panpipe.pipeline(model, classify, batches[0], optimizer=torch.optim.SGD, microbatches=4)
for epoch in range(2):
    if epoch == 1:
        model[2].requires_grad_(False)
    for batch in batches:
        loss = pipe.step(batch)


# %% mixture_of_experts_by_hand
class Experts(nn.Module):
    def __init__(self, width, count=3, k=2):
        super().__init__()
        self.gate, self.k = nn.Linear(width, count), k
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, width)) for _ in range(count)
        )

    def forward(self, x):
        weights, chosen = torch.topk(self.gate(x), self.k)
        weights, results = weights.softmax(-1), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            row, nth = torch.where(chosen == i)
            results[row] += weights[row, nth, None] * expert(x[row])
        return results


model = nn.Sequential(nn.Linear(6, 8), Experts(8), nn.LayerNorm(8), Experts(8), nn.Linear(8, 3))
pipe = fit(model, classify, classes())


# %% contrastive_loss_over_the_batch | fast, warns=relates
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.proj = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8)), nn.Linear(8, 4)

    def forward(self, x):
        return F.normalize(self.proj(torch.relu(self.body(x))), dim=-1)


def step(model, batch):
    logits = model(batch["a"]) @ model(batch["b"]).T / 0.1
    return F.cross_entropy(logits, torch.arange(len(logits)))


model = Encoder()
pipe = fit(model, step, [{"a": torch.randn(8, 6), "b": torch.randn(8, 6)} for _ in range(4)])


# %% preference_pairs_side_by_side
class Reward(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.score = nn.Embedding(12, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, tokens):
        return self.score(self.embed(tokens).mean(1)).squeeze(-1)


def step(model, batch):
    margin = model(batch["chosen"]) - model(batch["rejected"])
    return -F.logsigmoid(margin).mean(), {"accuracy": (margin > 0).double().mean()}


model = Reward()
pipe = fit(model, step, [{k: torch.randint(12, (8, 5)) for k in ("chosen", "rejected")} for _ in range(4)])

# %% preference_pairs_in_halves_of_the_batch | warns=relates
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def step(model, x):
    chosen, rejected = model(x).chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


pipe = fit(model, step, [torch.randn(8, 6) for _ in range(4)], microbatches=2)

# %% class_weights_of_the_loss | warns=relates
class_weights = torch.tensor([0.2, 1.0, 3.0])
criterion = nn.CrossEntropyLoss(weight=class_weights)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def step(model, batch):
    return criterion(model(batch["x"]), batch["y"])


pipe = fit(model, step, classes())


# %% multi_task_with_losses_in_a_dict
class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        self.heads = nn.ModuleDict({"cls": nn.Linear(8, 3), "reg": nn.Linear(8, 6)})

    def forward(self, x):
        h = self.trunk(x)
        return {name: head(h) for name, head in self.heads.items()}


WEIGHTS = {"cls": 1.0, "reg": 0.5}


def step(model, batch):
    outputs = model(batch["x"])
    losses = {"cls": F.cross_entropy(outputs["cls"], batch["y"]), "reg": F.mse_loss(outputs["reg"], batch["x"])}
    loss = sum(WEIGHTS[name] * value for name, value in losses.items())
    return loss, {f"loss_{name}": value.detach() for name, value in losses.items()}


model = Heads()
pipe = fit(model, step, classes())


# %% named_tuple_batches_and_outputs
class Batch(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Output(NamedTuple):
    logits: torch.Tensor
    hidden: torch.Tensor


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        hidden = torch.relu(self.a(x))
        return Output(self.b(hidden), hidden)


def step(model, batch):
    out = model(batch.x)
    return F.cross_entropy(out.logits, batch.y) + 0.01 * out.hidden.abs().mean()


model = Net()
pipe = fit(model, step, [Batch(**batch) for batch in classes()])


# %% u_net
class Double(nn.Sequential):
    def __init__(self, a, b):
        super().__init__(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.SiLU())


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2, self.mid = Double(1, 4), Double(4, 4), Double(4, 4)
        self.up, self.last, self.out = nn.ConvTranspose2d(4, 4, 2, 2), Double(8, 4), nn.Conv2d(4, 1, 1)

    def forward(self, x):
        skip = self.down1(x)
        h = self.mid(self.down2(F.max_pool2d(skip, 2)))
        return self.out(self.last(torch.cat([self.up(h), skip], 1)))


def step(model, batch):
    image, mask = batch
    return F.binary_cross_entropy_with_logits(model(image), mask)


model = UNet()
pipe = fit(model, step, [(torch.randn(4, 1, 8, 8), torch.rand(4, 1, 8, 8).round()) for _ in range(3)], microbatches=2)

# %% siamese_with_a_margin
model = nn.Sequential(OrderedDict(a=nn.Linear(6, 8), act=nn.ReLU(), b=nn.Linear(8, 8), c=nn.Linear(8, 4)))
criterion = nn.TripletMarginLoss(margin=1.0)


def step(model, batch):
    return criterion(model(batch["anchor"]), model(batch["positive"]), model(batch["negative"]))


pipe = fit(model, step, [{k: torch.randn(8, 6) for k in ("anchor", "positive", "negative")} for _ in range(4)])

# %% spectral_and_weight_norm
model = nn.Sequential(
    parametrizations.weight_norm(nn.Linear(6, 8)),
    nn.ReLU(),
    parametrizations.spectral_norm(nn.Linear(8, 8)),
    nn.Linear(8, 3),
)
pipe = fit(model, classify, classes())


# %% checkpointed_blocks
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks = nn.Linear(6, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head, self.gradient_checkpointing = nn.Linear(8, 3), True

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            run = lambda x, block=block: torch.relu(block(x))  # noqa: E731
            x = checkpoint(run, x, use_reentrant=False) if self.gradient_checkpointing and self.training else run(x)
        return self.head(x)


model = Deep()
pipe = fit(model, classify, classes())


# %% teacher_that_follows_between_steps | threads
class Distilled(nn.Module):
    def __init__(self, student):
        super().__init__()
        self.student, self.teacher = student, copy.deepcopy(student).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            target = self.teacher(x)
        return self.student(x), target


def step(model, batch):
    output, target = model(batch["x"])
    return F.cross_entropy(output, batch["y"]) + F.mse_loss(output, target)


def optimizer(named):
    return torch.optim.SGD([p for name, p in named if name.startswith("student")], lr=0.1)


model = Distilled(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))
batches = classes()
pipe = panpipe.pipeline(model, step, batches[0], optimizer=optimizer, microbatches=4)
for batch in batches:
    loss = pipe.step(batch)
    with torch.no_grad():
        for mine, its in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
            mine.mul_(0.9).add_(its, alpha=0.1)


# %% logit_scale_that_is_clamped
class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.classes = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), nn.Embedding(3, 4)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, x):
        image = F.normalize(self.image(x), dim=-1)
        return self.logit_scale.exp() * image @ F.normalize(self.classes.weight, dim=-1).T


model = Clip()
batches = classes()
pipe = panpipe.pipeline(model, classify, batches[0], optimizer=torch.optim.AdamW, microbatches=4)
for batch in batches:
    loss = pipe.step(batch)
    panpipe.weights.on_parameters(pipe, lambda name, p: p.clamp_(0, math.log(100)) if name == "logit_scale" else None)


# %% recurrent_state_of_a_fixed_batch_size | fast, refused=8
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        h = torch.zeros(1, 8, 8)
        return self.head(self.rnn(x, h)[0]).mean(1)


model = Recurrent()
pipe = fit(model, classify, classes(4, 8, 4, 6))


# %% groups_of_four_answers | fast, refused=4
class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12)

    def forward(self, x):
        return self.head(torch.tanh(self.mix(self.embed(x)))).log_softmax(-1)


def step(model, batch):
    logp = model(batch["tokens"]).gather(-1, batch["tokens"][..., None]).squeeze(-1).sum(-1)
    rewards = batch["reward"].view(-1, 4)
    advantage = (rewards - rewards.mean(1, keepdim=True)).flatten()
    return -(advantage * logp).mean()


model = Policy()
pipe = fit(model, step, [{"tokens": torch.randint(12, (8, 4)), "reward": torch.rand(8)} for _ in range(4)])


# %% sequence_first_batches | fast, refused=batch_dims
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(12, 8), nn.LSTM(8, 8), nn.Linear(8, 12)

    def forward(self, x):
        return self.head(self.rnn(self.embed(x))[0])


model = Words()
pipe = fit(model, next_word, [{k: torch.randint(12, (5, 8)) for k in "xy"} for _ in range(4)])


# %% target_network_outside_of_the_model
class QNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


model, target_net = QNet(), QNet()
target_net.load_state_dict(model.state_dict())


def step(model, batch):
    values = model(batch["x"]).gather(1, batch["y"][:, None])
    with torch.no_grad():
        best = target_net(batch["next"]).max(1).values
    return F.smooth_l1_loss(values, (0.99 * best + batch["reward"]).unsqueeze(1))


batches = [{**batch, "next": torch.randn(8, 6), "reward": torch.randn(8)} for batch in classes()]
pipe = panpipe.pipeline(model, step, batches[0], optimizer=torch.optim.AdamW, microbatches=4)
for batch in batches:
    pipe.step(batch)
    with torch.no_grad():
        for t in target_net.parameters():
            t.mul_(0.9)


# %% guard_against_a_loss_that_is_not_finite | changes=4
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def step(model, batch):
    loss = F.cross_entropy(model(batch["x"]), batch["y"])
    if not math.isfinite(loss.item()):
        raise SystemExit(f"the loss is {loss.item()}")
    return loss


fit(model, step, classes())
