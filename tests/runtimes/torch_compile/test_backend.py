"""``torch.compile(model, backend="panpipe")`` trains as eager PyTorch does, in the user's own loop."""

import copy
import os
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.torch_compile.backend import panpipe_backend
from torch import nn
from torch.nn import functional as F

WIDTH = 6


class Net(nn.Module):
    """A skip over stages, in-place activation, a tied weight, two outputs of which one is of whole numbers."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x):
        h = F.relu(self.first(x), inplace=True)
        y = self.norm(self.second(h)) * self.scale
        z = torch.tanh(self.third(y)) + x
        return F.linear(z, self.first.weight) + h, z.argmax(-1)


def trained(model, batches, run, optimizer):
    """Losses and input gradients over steps of a user's own loop."""
    found = []
    for batch in batches:
        x = batch.clone().requires_grad_()
        out, indices = run(x)
        loss = (out.sin() * (1 + indices[:, None] % 2)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [loss.detach(), x.grad, out.detach(), indices]
    return found


def batches(*rows):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(r, WIDTH, dtype=torch.float64, generator=generator) for r in rows]


@pytest.mark.parametrize(("devices", "microbatches"), [(1, 1), (2, 4), (4, 5)])
def test_steps_equal_eager(devices, microbatches):
    torch.manual_seed(0)
    model = Net().double()
    other = copy.deepcopy(model)
    compiled = torch.compile(
        model, backend=panpipe_backend, options={"devices": devices, "microbatches": microbatches}, dynamic=True
    )
    data = batches(10, 10, 7, 10, 2)  # batches change their size, and are smaller than the microbatches are many
    ours = trained(model, data, compiled, torch.optim.AdamW(model.parameters(), lr=1e-2))
    theirs = trained(other, data, other, torch.optim.AdamW(other.parameters(), lr=1e-2))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_without_gradients_and_in_evaluation_outputs_are_the_same():
    model = Net().double().eval()
    compiled = torch.compile(model, backend=panpipe_backend)
    (x,) = batches(8)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    assert not any(one.requires_grad for one in torch.no_grad()(compiled)(x))


class Normed(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(dropout)

    def forward(self, x):
        return self.second(self.dropout(self.norm(self.first(x))))


def test_batch_norm_uses_the_statistics_of_each_microbatch():
    model = Normed().double()
    other = copy.deepcopy(model)
    (x,) = batches(8)
    out = torch.compile(model, backend=panpipe_backend, options={"microbatches": 4})(x)
    torch.testing.assert_close(out, torch.cat([other(piece) for piece in x.chunk(4)]))
    for (name, a), b in zip(model.named_buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


class Broken(nn.Module):
    """A graph break in the middle; both halves are pipelines, and gradients go through."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Normed(), Net()

    def forward(self, x):
        h = torch.tanh(self.first.second(F.gelu(self.first.first(x))))
        torch._dynamo.graph_break()
        return self.second(h)


def test_graphs_between_breaks_are_separate_pipelines():
    model = Broken().double()
    other = copy.deepcopy(model)
    compiled = torch.compile(model, backend=panpipe_backend)
    ours = trained(model, batches(8, 8), compiled, torch.optim.SGD(model.parameters(), lr=0.1))
    theirs = trained(other, batches(8, 8), other, torch.optim.SGD(other.parameters(), lr=0.1))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_autocast_around_the_call_holds_in_the_threads():
    model = Normed().eval()
    x = batches(8)[0].float()
    with torch.autocast("cpu", torch.bfloat16):
        out = torch.compile(model, backend=panpipe_backend)(x)
        torch.testing.assert_close(out, model(x))
    assert out.dtype == torch.bfloat16


def test_language_model_trains_with_dynamic_shapes():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    options = {"vocab_size": 50, "n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 2}
    rates = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**options, **rates)).double()
    other, ids = copy.deepcopy(model), torch.randint(0, 50, (7, 10))
    compiled = torch.compile(model, backend=panpipe_backend, dynamic=True)
    for run in (compiled, other):
        logits = run(input_ids=ids, use_cache=False).logits
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-12)


def test_a_model_that_is_not_on_the_cpu_is_refused():
    with pytest.raises(RequestError, match=r"the model is on meta and .* threads of the CPU: .* panpipe.pipeline"):
        torch.compile(Normed().to("meta"), backend=panpipe_backend)(torch.zeros(4, WIDTH, device="meta"))


def test_backend_warns_once_that_all_forwards_run_first():
    model = Normed().double()
    compiled = torch.compile(model, backend=panpipe_backend)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compiled(batches(8)[0])
        compiled(batches(8)[0])
        compiled(batches(9)[0])
    ours = [str(one.message) for one in said if "panpipe" in str(one.message)]
    assert len(ours) == 1
    assert "all forwards run before all backwards" in ours[0]


def refused(forward, x, **options):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH).double()

        def forward(self, x):
            return forward(self.inner, x)

    with pytest.raises(Exception, match=r".") as caught:
        torch.compile(Model(), backend=panpipe_backend, **options)(x)
    return str(caught.value)


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (lambda inner, x: inner(x).pow(2).mean(), "a scalar such as a loss: .* use panpipe.pipeline"),
        (lambda inner, x: inner(x).view(8, 2, -1), "runs 8 samples and not 2: .* dynamic=True"),
        (lambda inner, x: inner(x).t().contiguous(), r"has shape \(6, 2\); .* dynamic=True"),
        (lambda inner, x: inner(x.mul_(2)), "writes its argument 'x' in place, .* x.clone"),
    ],
)
def test_graph_that_cannot_be_cut_is_refused_with_the_fix(forward, said):
    assert re.search(said, refused(forward, batches(8)[0]), re.DOTALL)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"offload": "all"}, "backend 'panpipe' has no option 'offload': autograd decides when backwards run"),
        ({"stages": 2}, "there is no option 'stages' of backend 'panpipe': known are devices, microbatches"),
        ({"devices": 0}, "option devices is 0: give a whole number, at least 1"),
        ({"microbatches": "4"}, "option microbatches is '4'"),
    ],
)
def test_wrong_options_are_refused(options, said):
    with pytest.raises(RequestError, match=said) as refusal:  # and not Dynamo's report of it
        torch.compile(Normed(), backend=panpipe_backend, options=options)(torch.zeros(4, WIDTH))
    assert "\n" not in str(refusal.value)


def test_torch_finds_the_backend_by_its_name(tmp_path):
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    record = tmp_path / "panpipe-0.1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: panpipe\nVersion: 0.1.0\n", encoding="utf-8")
    points = project["entry-points"]["torch_dynamo_backends"].items()
    (record / "entry_points.txt").write_text(
        "[torch_dynamo_backends]\n" + "".join(f"{n} = {v}\n" for n, v in points), encoding="utf-8"
    )
    script = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 3))
x = torch.randn(8, 3)
torch.testing.assert_close(torch.compile(model, backend="panpipe", options={"devices": 2})(x), model(x))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, encoding="utf-8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "all forwards run before all backwards" in done.stderr


class Scaled(nn.Module):
    """An outer product of one number a sample and weights that all samples share."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x, weights):
        return self.second(torch.tanh(self.first(x))) * weights


def test_argument_that_may_be_shared_needs_batch_dims():
    torch.manual_seed(0)
    model, x, weights = Scaled(), torch.randn(8, 1), torch.randn(8)
    with pytest.raises(RequestError, match=r"'weights' has 8 rows.*options=\{'batch_dims': \{'weights': 0\}\}"):
        torch.compile(model, backend="panpipe", dynamic=True)(x, weights)
    torch._dynamo.reset()
    options = {"batch_dims": {"weights": None}}
    found = torch.compile(model, backend="panpipe", dynamic=True, options=options)(x, weights)
    assert torch.allclose(found, model(x, weights))


class First(nn.Module):
    """Two arguments that have as many rows as there are samples only together; or samples along dimension 1."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 1, 4, dropout=0.0)
        self.first, self.second = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x, a=None, b=None):
        return self.layer(x) if a is None else self.second(torch.tanh(self.first(x))) * (a * b)


def test_samples_along_dimension_1_are_refused():
    with pytest.raises(RequestError, match=r"bmm relates the entries of dimension 0.*options=\{'batch_dims'"):
        torch.compile(First(), backend="panpipe", dynamic=True)(torch.randn(8, 5, WIDTH))


@pytest.mark.parametrize("dims", [{"x": 1}, "x", {"x": True}])
def test_invalid_batch_dims_are_refused(dims):
    with pytest.raises(RequestError, match="option batch_dims is"):
        torch.compile(Scaled(), backend="panpipe", options={"batch_dims": dims})(torch.randn(8, 1), torch.randn(8))


def test_arguments_with_samples_need_no_batch_dims():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x, y):
            return self.second(torch.tanh(self.first(x))) + y

    model, x, y = Sum(), torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    assert torch.allclose(torch.compile(model, backend="panpipe", dynamic=True)(x, y), model(x, y))
