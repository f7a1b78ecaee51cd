"""Loops of users around ``torch.compile(model, backend="panpipe")``: precision, accumulation, several models."""

import copy

import pytest
import torch
from panpipe.core.capture.graph.randomness import KeyedRandom, random_key
from panpipe.core.errors import RequestError
from panpipe.runtimes.torch_compile.backend import panpipe_backend
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ...support.parity import largest

WIDTH, MICROBATCHES = 6, 4


class Net(nn.Module):
    """A skip over both stages, a norm, dropout, and a middle that may be checkpointed."""

    def __init__(self, dropout=0.0, checkpointed=False, out=WIDTH):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(WIDTH, 16), nn.Linear(16, 16), nn.Linear(16, out)
        self.norm, self.dropout, self.checkpointed = nn.LayerNorm(16), nn.Dropout(dropout), checkpointed

    def middle(self, h):
        return self.dropout(F.gelu(self.norm(self.second(h))))

    def forward(self, x):
        h = torch.relu(self.first(x))
        middle = checkpoint(self.middle, h, use_reentrant=False) if self.checkpointed else self.middle(h)
        return self.third(middle + h)


def pair(**options):
    torch.manual_seed(0)
    model = Net(**options)
    return model, copy.deepcopy(model)


def compiled(model, devices=2):
    options = {"devices": devices, "microbatches": MICROBATCHES}
    return torch.compile(model, backend=panpipe_backend, options=options)


def one_after_another(model):
    """The eager model on microbatches, where each casts its weights for itself."""

    def run(x):
        with torch.autocast("cpu", torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu"), False):
            return torch.cat([model(piece) for piece in x.tensor_split(MICROBATCHES) if len(piece)])

    return run


def trained(model, run, dtype, scaler, batches_a_step, *, sizes=(8, 8, 7, 9, 3, 8)):
    """What a loop shows: scales, norms and outputs of evaluations; parameters are in the model."""
    named = list(model.named_parameters())
    groups = [
        {"params": [p for name, p in named if "weight" in name], "weight_decay": 0.1},
        {"params": [p for name, p in named if "bias" in name], "weight_decay": 0.0, "lr": 3e-3},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(sizes))
    generator, shown = torch.Generator().manual_seed(0), {"scale": [], "norm": [], "evaluated": []}
    for rows in sizes:
        for _ in range(batches_a_step):
            x, y = torch.randn(2, rows, WIDTH, generator=generator)
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = F.mse_loss(run(x).float(), y) / batches_a_step
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            shown["evaluated"].append(run(torch.linspace(-1, 1, 5 * WIDTH).view(5, WIDTH)))
        model.train()
        shown["scale"].append(scaler.get_scale())
        shown["norm"].append(norm)
    return shown


def distance(ours, theirs):
    return largest((a - b).norm().item() / (b.norm().item() or 1) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("dtype", "first_scale", "batches_a_step", "rounding"),
    [
        (torch.float16, 2.0**22, 2, 2e-3),  # too large for gradients of float16
        (torch.bfloat16, None, 1, 2e-2),
        (None, None, 2, 1e-5),
    ],
)
def test_training_loop_with_common_features_equals_eager(dtype, first_scale, batches_a_step, rounding):
    found = []
    for made in (compiled, one_after_another, lambda model: model):
        model, _ = pair()
        scaler = torch.amp.GradScaler(
            "cpu", first_scale or 1.0, backoff_factor=2.0**-8, growth_interval=2, enabled=first_scale is not None
        )
        found.append((model, trained(model, made(model), dtype, scaler, batches_a_step)))
    (model, ours), (same, microbatched), (plain, eager) = found
    assert ours["scale"] == microbatched["scale"] == eager["scale"]
    overflows = [not norm.isfinite() for norm in ours["norm"]]
    assert any(overflows) == (first_scale == 2.0**22)
    assert not all(overflows)
    for other, shown, tolerance in ((same, microbatched, 1e-5), (plain, eager, rounding)):
        assert distance(model.parameters(), other.parameters()) < tolerance
        assert distance(ours["evaluated"], shown["evaluated"]) < 10 * tolerance
        finite = [(a, b) for a, b, over in zip(ours["norm"], shown["norm"], overflows, strict=True) if not over]
        assert distance(*zip(*finite, strict=True)) < tolerance


def test_an_overflow_in_one_microbatch_alone_skips_the_step():
    model, other = pair()
    x = torch.randn(8, WIDTH)
    x[5] = 6e4
    for run, trained_model in ((compiled(model), model), (other, other)):
        before = [p.detach().clone() for p in trained_model.parameters()]
        scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(trained_model.parameters(), lr=0.1)
        with torch.autocast("cpu", torch.float16):
            loss = run(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**15
        assert all(map(torch.equal, before, trained_model.parameters()))


def test_generator_and_discriminator_train_like_eager():
    found = []
    for wrapped in (compiled, lambda model: model):
        (maker, _), judge = pair(), Net(out=1)
        make, assess = wrapped(maker), wrapped(judge)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (maker, judge)]
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            noise, real = torch.randn(2, 8, WIDTH, generator=generator)
            made = make(noise)
            optimizers[1].zero_grad()
            (F.softplus(-assess(real)).mean() + F.softplus(assess(made.detach())).mean()).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            F.softplus(-assess(made)).mean().backward()
            optimizers[0].step()
        found.append([*maker.parameters(), *judge.parameters()])
    assert distance(*found) < 1e-5


@pytest.mark.parametrize("checkpointed", [False, True])
def test_dropout_has_the_numbers_of_each_microbatch(checkpointed):
    model, other = pair(dropout=0.5, checkpointed=checkpointed)
    other.checkpointed = False
    torch.manual_seed(7)
    seeds = [int(torch.randint(1 << 62, ())) for _ in range(2)]  # what the compiled model draws in each call
    run, batches = compiled(model), torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(2))
    torch.manual_seed(7)
    for x in batches:
        run(x).square().sum().backward()
    for seed, x in zip(seeds, batches, strict=True):
        for m, piece in enumerate(x.chunk(MICROBATCHES)):
            with KeyedRandom(random_key(seed, 0, m)):
                loss = other(piece).square().sum()
            loss.backward()
    gradients = [[p.grad for p in one.parameters()] for one in (model, other)]
    assert distance(*gradients) < 1e-6


def test_hooks_of_a_parameter_see_its_whole_gradient_once():
    model, other = pair()
    seen = []
    for one in (model, other):
        one.first.weight.register_hook(lambda gradient: seen.append(gradient) or gradient / 2)
    x = torch.randn(8, WIDTH)
    compiled(model)(x).square().sum().backward()
    other(x).square().sum().backward()
    ours, theirs = seen
    assert distance([ours, model.first.weight.grad], [theirs, other.first.weight.grad]) < 1e-6


def test_gradients_of_gradients_are_refused():
    model, _ = pair()
    x = torch.randn(8, WIDTH, requires_grad=True)
    with pytest.raises(RequestError, match=r"create_graph=True .* before torch.compile") as refusal:
        torch.autograd.grad(compiled(model)(x).sum(), x, create_graph=True)
    assert "\n" not in str(refusal.value)
