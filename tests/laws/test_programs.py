"""Ordinary training programs as users write them: equal to eager PyTorch over the same microbatches, or refused."""

import copy
import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, rnn

from ..support.registry import Registry
from .programs import Program, difference, names_a_line, refusal

NEAR = 1e-9
W, T, V = 4, 5, 11
"""Width, length and vocabulary."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*relates samples of the batch"),  # of queues, codes and sums; it is true
    pytest.mark.filterwarnings("ignore:microbatches of a new shape"),
    pytest.mark.filterwarnings("ignore:.*the step is captured again for each new value"),
    pytest.mark.filterwarnings("ignore:.*the loss does not depend on it"),
]
right, refused = Registry(), Registry()


def f64(module):
    return module.double()


def seeded(make):
    torch.manual_seed(0)
    return f64(make())


def chain(*middle, ends=(W, W)):
    return seeded(lambda: nn.Sequential(nn.Linear(ends[0], W), *(middle or (nn.Tanh(),)), nn.Linear(W, ends[1])))


def vectors(rows, g):
    return {"x": torch.randn(rows, W, dtype=torch.float64, generator=g),
            "y": torch.randn(rows, W, dtype=torch.float64, generator=g)}  # fmt: skip


def classes(rows, g):
    return {"x": torch.randn(rows, W, dtype=torch.float64, generator=g),
            "y": torch.randint(0, 3, (rows,), generator=g)}  # fmt: skip


def sequences(rows, g):
    return {"x": torch.randn(rows, T, W, dtype=torch.float64, generator=g),
            "y": torch.randn(rows, T, W, dtype=torch.float64, generator=g)}  # fmt: skip


def tokens(rows, g):
    return {"x": torch.randint(0, V, (rows, T), generator=g), "y": torch.randint(0, V, (rows, T), generator=g)}


def fit(m, b):
    return F.mse_loss(m(b["x"]), b["y"])


def on_vectors(cls):
    return Program(chain(cls()), fit, vectors)


# Losses


@right
def losses_weighted_by_learned_variances():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.a, self.b = nn.Linear(W, W), nn.Linear(W, W), nn.Linear(W, 3)
            self.log_vars = nn.Parameter(torch.zeros(2))

        def forward(self, x):
            h = torch.relu(self.trunk(x))
            return self.a(h), self.b(h)

    def batch(rows, g):
        return {**vectors(rows, g), "c": torch.randint(0, 3, (rows,), generator=g)}

    def step(m, b):
        values, logits = m(b["x"])
        losses = [F.mse_loss(values, b["y"]), F.cross_entropy(logits, b["c"])]
        return sum(torch.exp(-m.log_vars[i]) * loss + m.log_vars[i] for i, loss in enumerate(losses))

    return Program(seeded(Weighted), step, batch)


@right
def distillation_with_temperature_and_a_frozen_teacher():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = nn.Linear(W, 3), nn.Linear(W, 3)
            self.teacher.requires_grad_(False)

        def forward(self, x):
            with torch.no_grad():
                wanted = self.teacher(x)
            return self.student(x), wanted

    def step(m, b):
        mine, wanted = m(b["x"])
        soft = F.kl_div(F.log_softmax(mine / 2, -1), F.softmax(wanted / 2, -1), reduction="batchmean") * 4
        return 0.5 * soft + 0.5 * F.cross_entropy(mine, b["y"])

    return Program(seeded(Both), step, classes)


class Averaged(nn.Module):
    """A student, and a teacher that averages it in the step (BYOL, mean teacher)."""

    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(W, W), nn.Tanh(), nn.Linear(W, W))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    @torch.no_grad()
    def follow(self):
        for mine, its in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mine.lerp_(its, 0.1)

    def forward(self, x):
        with torch.no_grad():
            wanted = self.teacher(x)
        return F.mse_loss(self.student(x * 1.1), wanted)


@refused
def teacher_that_is_averaged_in_the_step():
    def step(m, b):
        m.follow()
        return m(b["x"])

    return Program(seeded(Averaged), step, vectors)


class Queue(nn.Module):
    """Contrast with keys of earlier batches (MoCo)."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(W, W), nn.Tanh(), nn.Linear(W, W))
        self.register_buffer("queue", F.normalize(torch.randn(8, W), dim=1))
        self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, x, y):
        q = F.normalize(self.encode(x), dim=1)
        k = F.normalize(y, dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().T], 1) / 0.2
        self.enqueue(k)
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


@right
def contrast_with_a_queue_by_rolling():
    class Rolled(Queue):
        @torch.no_grad()
        def enqueue(self, k):
            self.queue = torch.cat([k, self.queue])[:8]

    return Program(seeded(Rolled), lambda m, b: m(b["x"], b["y"]), vectors, sizes=(4, 4, 4, 4))


@right
def contrast_with_a_queue_by_a_pointer_of_python():
    class ByNumber(Queue):
        @torch.no_grad()
        def enqueue(self, k):
            ptr = int(self.ptr)
            self.queue[ptr : ptr + len(k)] = k
            self.ptr[0] = (ptr + len(k)) % 8

    return Program(seeded(ByNumber), lambda m, b: m(b["x"], b["y"]), vectors, sizes=(4, 4, 4, 4))


@right
def policy_gradient_with_log_probs_and_entropy():
    def batch(rows, g):
        return {"s": torch.randn(rows, W, dtype=torch.float64, generator=g),
                "a": torch.randint(0, 3, (rows,), generator=g),
                "r": torch.randn(rows, dtype=torch.float64, generator=g)}  # fmt: skip

    def step(m, b):
        dist = torch.distributions.Categorical(logits=m(b["s"]))
        return -(dist.log_prob(b["a"]) * b["r"]).mean() - 0.01 * dist.entropy().mean()

    return Program(chain(ends=(W, 3)), step, batch)


# Sequences


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, W)
        self.encoder = nn.GRU(W, W, batch_first=True)
        self.cell = nn.GRUCell(W, W)
        self.head = nn.Linear(W, V)
        self.ratio = 1.0


@right
def teacher_forcing_by_a_ratio_of_tensors():
    class Forced(Seq2Seq):
        def forward(self, x, y):
            _, h = self.encoder(self.embed(x))
            h, token, logits = h[0], y[:, 0], []
            for t in range(1, y.shape[1]):
                h = self.cell(self.embed(token), h)
                logits.append(self.head(h))
                forced = torch.rand(len(y)) < 0.5
                token = torch.where(forced, y[:, t], logits[-1].argmax(-1))
            return torch.stack(logits, 1)

    def step(m, b):
        return F.cross_entropy(m(b["x"], b["y"]).flatten(0, 1), b["y"][:, 1:].flatten())

    return Program(seeded(Forced), step, tokens)


@right
def list_of_samples_that_the_step_pads():
    def batch(rows, g):
        return [torch.randn(2 + i % 2, W, dtype=torch.float64, generator=g) for i in range(rows)]

    def step(m, b):
        padded = rnn.pad_sequence(b, batch_first=True)
        return m(padded).square().mean()

    return Program(chain(), step, batch, sizes=(4, 4, 4))


# Modules


@right
def spectral_norm():
    return Program(chain(parametrizations.spectral_norm(nn.Linear(W, W)), nn.Tanh()), fit, vectors)


@right
def parametrizations_within_a_cached_block():
    class Symmetric(nn.Module):
        def forward(self, x):
            return x.triu() + x.triu(1).T

    model = chain(parametrizations.weight_norm(nn.Linear(W, W)), nn.Tanh())
    parametrize.register_parametrization(model[0], "weight", Symmetric())

    def step(m, b):
        with parametrize.cached():
            return fit(m, b) + 0.1 * m[1](b["x"]).square().mean()

    return Program(model, step, vectors)


@right
def gradient_reversal():
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return -0.3 * grad

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.label, self.domain = nn.Linear(W, W), nn.Linear(W, W), nn.Linear(W, 1)

        def forward(self, x):
            h = torch.tanh(self.trunk(x))
            return self.label(h), self.domain(Reverse.apply(h)).squeeze(1)

    def batch(rows, g):
        return {**vectors(rows, g), "d": torch.randint(0, 2, (rows,), generator=g).double()}

    def step(m, b):
        label, domain = m(b["x"])
        return F.mse_loss(label, b["y"]) + F.binary_cross_entropy_with_logits(domain, b["d"])

    return Program(seeded(Adapted), step, batch)


@right
def shared_module_called_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(W, W), nn.Linear(W, W)

        def forward(self, x):
            return self.a(torch.tanh(self.b(torch.tanh(self.a(x)))))

    return Program(seeded(Twice), fit, vectors)


@right
def hooks_that_change_activations():
    model = chain()
    model[0].register_forward_hook(lambda m, i, o: o * 1.5)
    model[2].register_forward_pre_hook(lambda m, i: (i[0] + 0.1,))
    return Program(model, fit, vectors)


@right
def features_that_hooks_collect_for_the_loss():
    model, features = chain(), {}
    for name, module in model.named_children():
        module.register_forward_hook(lambda m, i, o, name=name: features.__setitem__(name, o))

    def step(m, b):
        return fit(m, b) + 0.01 * sum(h.square().mean() for h in features.values())

    return Program(model, step, vectors)


@right
def functional_call_with_scaled_weights():
    def step(m, b):
        scaled = {n: p * 0.9 for n, p in m.named_parameters()}
        return F.mse_loss(functional_call(m, scaled, (b["x"],)), b["y"])

    return Program(chain(), step, vectors)


@refused
def meta_learning_by_one_inner_step():
    def step(m, b):
        named = dict(m.named_parameters())
        inner = F.mse_loss(functional_call(m, named, (b["x"],)), b["y"])
        grads = torch.autograd.grad(inner, list(named.values()), create_graph=True)
        adapted = {n: p - 0.1 * g for (n, p), g in zip(named.items(), grads, strict=True)}
        return F.mse_loss(functional_call(m, adapted, (b["y"],)), b["x"])

    return Program(chain(), step, vectors)


@refused
def gradient_penalty_on_inputs():
    def step(m, b):
        x = b["x"].clone().requires_grad_()
        out = m(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, b["y"]) + 0.1 * (grad.norm(dim=1) - 1).square().mean()

    return Program(chain(), step, vectors)


@right.of(on_vectors)
class BufferOfClassBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = nn.Buffer(torch.zeros((), dtype=torch.float64))
        self.scale = nn.Buffer(torch.full((W,), 2.0), persistent=False)

    def forward(self, x):
        self.seen += len(x)
        return torch.tanh(x) * self.scale


@right.of(on_vectors)
class CountersInBuffersThatAnneal(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.n += 1
        return torch.tanh(x) * (0.9 ** self.n.double())


@right
def vector_quantisation_with_averaged_codes():
    class Codes(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("codes", torch.randn(6, W))
            self.register_buffer("counts", torch.ones(6))

        def forward(self, x):
            ids = torch.cdist(x, self.codes).argmin(1)
            hot = F.one_hot(ids, 6).to(x.dtype)
            q = self.codes[ids]
            with torch.no_grad():
                self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.codes.mul_(0.9).add_(hot.T @ x.detach() / self.counts[:, None], alpha=0.1)
            return x + (q - x).detach()

    return Program(chain(Codes(), nn.Tanh()), fit, vectors)


@right
def complex_numbers_of_a_fourier_layer():
    class Fourier(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(T // 2 + 1, W, dtype=torch.complex128))

        def forward(self, x):
            return torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.weight, n=x.shape[1], dim=1)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(W, W).double(), Fourier(), nn.Linear(W, W).double())
    return Program(model, fit, sequences)


@right
def weight_scaled_by_a_constant_of_the_microbatch_size():
    """The constants of both shapes of microbatch have the same name."""

    class Scaled(nn.Linear):
        def forward(self, x):
            return F.linear(x, (self.weight * torch.tensor(float(len(x)), dtype=x.dtype)).sin(), self.bias)

    return Program(chain(Scaled(W, W)), fit, vectors)


# Inside the step


@right
def mix_up_by_a_permutation_and_beta():
    def step(m, b):
        lam = torch.distributions.Beta(torch.tensor(0.4), torch.tensor(0.4)).sample()
        index = torch.randperm(len(b["x"]))
        x = lam * b["x"] + (1 - lam) * b["x"][index]
        out = m(x)
        return lam * F.mse_loss(out, b["y"]) + (1 - lam) * F.mse_loss(out, b["y"][index])

    return Program(chain(), step, vectors, dims=0)


@right
def cut_mix_by_a_mask():
    def batch(rows, g):
        return {"x": torch.randn(rows, 2, 4, 4, dtype=torch.float64, generator=g),
                "y": torch.randint(0, 3, (rows,), generator=g)}  # fmt: skip

    def step(m, b):
        x, other = b["x"], b["x"].roll(1, 0)
        corner = torch.randint(0, 3, (len(x), 2))
        rows = torch.arange(4)
        inside = (rows >= corner[:, :1]) & (rows < corner[:, :1] + 2)
        across = (rows >= corner[:, 1:]) & (rows < corner[:, 1:] + 2)
        mask = (inside[:, :, None] & across[:, None, :]).unsqueeze(1)
        share = mask.double().mean((1, 2, 3))
        out = m(torch.where(mask, other, x))
        mine = F.cross_entropy(out, b["y"], reduction="none")
        others = F.cross_entropy(out, b["y"].roll(1, 0), reduction="none")
        return ((1 - share) * mine + share * others).mean()

    model = seeded(lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)))
    return Program(model, step, batch, dims=0)


@right
def autocast_in_bfloat16_inside_the_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(W, W), nn.Tanh(), nn.Linear(W, W))

    def batch(rows, g):
        return {k: v.float() for k, v in vectors(rows, g).items()}

    def step(m, b):
        with torch.autocast("cpu", torch.bfloat16):
            out = m(b["x"])
        return F.mse_loss(out.float(), b["y"])

    return Program(model, step, batch)


@refused
def loss_that_is_skipped_if_it_is_a_spike():
    state = {"mean": None}

    def step(m, b):
        loss = fit(m, b)
        value = loss.item()
        state["mean"] = value if state["mean"] is None else 0.9 * state["mean"] + 0.1 * value
        return loss if value < 3 * state["mean"] else loss * 0

    return Program(chain(), step, vectors)


@right
def samples_that_are_selected_by_a_mask():
    def step(m, b):
        losses = (m(b["x"]) - b["y"]).square().mean(1)
        return losses[losses > losses.detach().median()].sum()

    return Program(chain(), step, vectors, dims=0, sizes=(4, 4, 4))


# Batches and calls


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor
    name: str = "train"


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    logits: Any = None


@right
def dataclass_batch_and_output():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(W, W), nn.Tanh(), nn.Linear(W, W))

        def forward(self, batch):
            out = self.layers(batch.x)
            return Output(F.mse_loss(out, batch.y), out)

    return Program(seeded(Model), lambda m, b: m(b), lambda rows, g: Batch(**vectors(rows, g)))


@right
def one_hot_targets_that_are_sparse_indices():
    def batch(rows, g):
        return {"x": torch.randn(rows, W, dtype=torch.float64, generator=g),
                "ids": torch.randint(0, 3, (rows, 2), generator=g)}  # fmt: skip

    def step(m, b):
        target = torch.zeros(len(b["x"]), 3, dtype=torch.float64).scatter_(1, b["ids"], 1.0)
        return F.binary_cross_entropy_with_logits(m(b["x"]), target)

    return Program(chain(ends=(W, 3)), step, batch)


# Tables that the first call sets up


class Positions(nn.Module):
    @staticmethod
    def table(size):
        return torch.sin(torch.arange(size, dtype=torch.float64)[:, None] / torch.arange(1, W + 1))


def positioned(cls):
    lengths = iter((5, 5, 3, 5, 7, 5, 7) * 2)

    def batch(rows, g):
        size = next(lengths)
        return {k: torch.randn(rows, size, W, dtype=torch.float64, generator=g) for k in "xy"}

    return Program(chain(cls()), fit, batch, sizes=(4, 4, 4, 4, 3, 4, 4), dims=0)


@right.of(positioned)
class TableInAnAttributeThatIsNoneAtFirst(Positions):
    pe = None

    def forward(self, x):
        if self.pe is None:
            self.pe = self.table(16)
        return x + self.pe[: x.shape[1]]


@right.of(positioned)
class TableThatGrows(Positions):
    def __init__(self):
        super().__init__()
        self.pe = None

    def forward(self, x):
        if self.pe is None or len(self.pe) < x.shape[1]:
            self.pe = self.table(x.shape[1])
        return x + self.pe[: x.shape[1]]


@right.of(positioned)
class TableThatGrowsWithItsSize(Positions):
    def __init__(self):
        super().__init__()
        self.size = 0

    def forward(self, x):
        if x.shape[1] > self.size:
            self.size = x.shape[1]
            self.cos, self.sin = self.table(self.size).cos(), self.table(self.size)
        return x * self.cos[: x.shape[1]] + self.sin[: x.shape[1]]


@right.of(positioned)
class BufferThatGrows(Positions):
    def __init__(self):
        super().__init__()
        self.register_buffer("pe", self.table(5), persistent=False)

    def forward(self, x):
        if len(self.pe) < x.shape[1]:
            self.register_buffer("pe", self.table(x.shape[1]), persistent=False)
        return x + self.pe[: x.shape[1]]


@right.of(positioned)
class BufferThatIsNoneAtFirst(Positions):
    def __init__(self):
        super().__init__()
        self.register_buffer("pe", None, persistent=False)

    def forward(self, x):
        if self.pe is None or len(self.pe) < x.shape[1]:
            self.pe = self.table(x.shape[1])
        return x + self.pe[: x.shape[1]]


@right.of(positioned)
class BufferThatTheForwardRegisters(Positions):
    def forward(self, x):
        if not hasattr(self, "table_of_all"):
            self.register_buffer("table_of_all", self.table(16), persistent=False)
        return x + self.table_of_all[: x.shape[1]]


@right.of(positioned)
class MaskInADictBySize(nn.Module):
    def __init__(self):
        super().__init__()
        self.masks = {}

    def forward(self, x):
        size = x.shape[1]
        if size not in self.masks:
            self.masks[size] = torch.ones(size, size, dtype=x.dtype).tril() / size
        return self.masks[size] @ x


@right.of(positioned)
class TableOfACachedProperty(Positions):
    @functools.cached_property
    def all(self):
        return self.table(16)

    def forward(self, x):
        return x + self.all[: x.shape[1]]


@functools.lru_cache
def table_of(size):
    return Positions.table(size)


@right.of(positioned)
class TableOfACachedFunction(nn.Module):
    def forward(self, x):
        return x + table_of(x.shape[1])


@right.of(positioned)
class TableOfACachedMethod(Positions):
    @functools.lru_cache  # noqa: B019
    def of(self, size):
        return self.table(size)

    def forward(self, x):
        return x + self.of(x.shape[1])


TABLES: dict[str, Any] = {}


@right
def table_in_a_global_dict():
    TABLES.clear()

    class Cached(Positions):
        def forward(self, x):
            if len(TABLES.get("pe", ())) < x.shape[1]:
                TABLES["pe"] = self.table(x.shape[1])
            return x + TABLES["pe"][: x.shape[1]]

    return positioned(Cached)


@refused.of(positioned)
class MaskOfTheFirstBatch(nn.Module):
    mask = None

    def forward(self, x):
        if self.mask is None:
            self.mask = (x[:1, :1] > 0).to(x.dtype)
        return x * self.mask


@refused
def mean_of_the_first_batch_in_a_class():
    class Centred(nn.Module):
        mean = None

        def forward(self, x):
            if Centred.mean is None:
                Centred.mean = x.detach().mean(0)
            return x - Centred.mean

    return positioned(Centred)


@right
def table_in_a_class():
    class Cached(Positions):
        all = None

        def forward(self, x):
            if Cached.all is None or len(Cached.all) < x.shape[1]:
                Cached.all = self.table(x.shape[1])
            return x + Cached.all[: x.shape[1]]

    return positioned(Cached)


@right
def table_around_a_function_that_the_forward_calls():
    table = None

    def positions(size):
        nonlocal table
        if table is None or len(table) < size:
            table = Positions.table(size)
        return table[:size]

    class Cached(nn.Module):
        def forward(self, x):
            return x + positions(x.shape[1])

    return positioned(Cached)


@refused.of(positioned)
class TableOfAParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.cache = nn.Parameter(torch.ones(W)), None

    def forward(self, x):
        if self.cache is None:
            self.cache = self.weight.detach().softmax(0)
        return x * self.cache


@refused.of(positioned)
class ProjectionThatIsDrawnOnce(nn.Module):
    projection = None

    def forward(self, x):
        if self.projection is None:
            self.projection = torch.randn(W, W, dtype=x.dtype)
        return x @ self.projection


@refused.of(positioned)
class PartOfATableThatIsWrittenFromTheBatch(nn.Module):
    table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.zeros(W, dtype=x.dtype)
            self.table[0] = x.detach().mean()
        return x + self.table


class AdaptiveLanguageModel(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(V, W), nn.Linear(W, W)
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(W, V, **options)

    def forward(self, x):
        return self.hidden(self.embedding(x)).tanh()


def words(rows, g):
    return {"x": torch.randint(V, (rows, T), generator=g), "y": torch.randint(V, (rows, T), generator=g)}


@right
def adaptive_softmax_in_the_step():
    def step(m, b):
        return m.loss(m(b["x"]).flatten(0, 1), b["y"].flatten()).loss

    return Program(seeded(lambda: AdaptiveLanguageModel(cutoffs=[3, 6], div_value=2.0)), step, words)


@right
def adaptive_softmax_over_three_clusters_for_the_last_word():
    def step(m, b):
        return -m.loss(m(b["x"])[:, -1], b["y"][:, -1]).output.mean()

    return Program(seeded(lambda: AdaptiveLanguageModel(cutoffs=[2, 5, 8], div_value=1.0, head_bias=True)), step, words)


@right
def use_of_codes_that_is_counted():
    class Codes(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(V, W)
            self.register_buffer("used", torch.zeros(V))

        def forward(self, x):
            nearest = torch.cdist(x, self.table.weight).argmin(-1)
            self.used += torch.bincount(nearest, minlength=V)
            return x + (self.table(nearest) - x).detach(), F.mse_loss(self.table(nearest), x.detach())

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.codes, self.decoder = nn.Linear(W, W), Codes(), nn.Linear(W, W)

    def step(m, b):
        coded, loss = m.codes(m.encoder(b["x"]))
        return F.mse_loss(m.decoder(coded), b["y"]) + loss

    return Program(seeded(Model), step, vectors)


class Routed(nn.Module):
    """Experts that get the rows that are sent to them; what balances them is an attribute, as in many libraries."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(W, 2), nn.ModuleList(nn.Linear(W, W) for _ in range(2))
        self.losses = []

    def forward(self, x):
        shares = self.router(x).softmax(-1)
        chosen, out = shares.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            out = out.index_add(0, rows, shares[rows, number, None] * expert(x[rows]))
        self.balance = shares.mean(0).square().sum()
        return out


@right
def loss_that_a_module_with_values_leaves_in_an_attribute():
    def step(m, b):
        return F.mse_loss(m(b["x"]), b["y"]) + 0.1 * m[1].balance

    return Program(chain(seeded(Routed)), step, vectors)


@refused
def list_that_a_module_with_values_fills_for_the_step():
    class Listing(Routed):
        def forward(self, x):
            out = super().forward(x)
            self.losses.append(self.balance)
            return out

    def step(m, b):
        m[1].losses.clear()
        return F.mse_loss(m(b["x"]), b["y"]) + sum(m[1].losses)

    return Program(chain(seeded(Listing)), step, vectors)


@right
def layers_with_dropout_that_are_skipped_at_random():
    model = nn.ModuleList(nn.Linear(W, W) for _ in range(4)).double()

    def step(m, b):
        x = m[0](b["x"])
        for layer in m[1:]:
            if torch.rand(()).item() < 0.5:
                continue
            x = x + F.dropout(torch.tanh(layer(x)), 0.3)
        return F.mse_loss(x, b["y"])

    return Program(model, step, vectors)


FAST = {
    "layers_with_dropout_that_are_skipped_at_random", "list_that_a_module_with_values_fills_for_the_step",
    "TableInAnAttributeThatIsNoneAtFirst", "BufferThatGrows",
    "BufferThatTheForwardRegisters", "MaskInADictBySize", "table_in_a_global_dict",
    "TableOfAParameter",
    "ProjectionThatIsDrawnOnce", "PartOfATableThatIsWrittenFromTheBatch",
    "mean_of_the_first_batch_in_a_class", "table_in_a_class",
    "table_around_a_function_that_the_forward_calls", 
    "contrast_with_a_queue_by_rolling", "gradient_reversal",
    "distillation_with_temperature_and_a_frozen_teacher", "mix_up_by_a_permutation_and_beta", "spectral_norm",
    "policy_gradient_with_log_probs_and_entropy",
    "functional_call_with_scaled_weights", "complex_numbers_of_a_fourier_layer", "dataclass_batch_and_output",
    "vector_quantisation_with_averaged_codes", "autocast_in_bfloat16_inside_the_step",
    "weight_scaled_by_a_constant_of_the_microbatch_size",
    "adaptive_softmax_in_the_step", "use_of_codes_that_is_counted",
    "teacher_that_is_averaged_in_the_step", "loss_that_is_skipped_if_it_is_a_spike", "gradient_penalty_on_inputs",
}  # fmt: skip
"""One or two of each kind; the others are left out of the fast suite."""


def cases(registry):
    assert {*right, *refused} >= FAST
    return [
        pytest.param(make, id=name, marks=[] if name in FAST else [pytest.mark.slow]) for name, make in registry.items()
    ]


@pytest.mark.parametrize("make", cases(right))
def test_program_trains_as_eager_pytorch_does(make):
    assert difference(make) < NEAR


@pytest.mark.parametrize("make", cases(refused))
def test_program_that_cannot_equal_eager_is_refused_with_its_line(make):
    message = refusal(make)
    assert names_a_line(message, __file__), message
