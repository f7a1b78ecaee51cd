"""Models and steps as users write them, in which a tensor is another than it seems, or a number is read early."""

import functools
import random

import numpy
import pytest
import torch
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.errors import RequestError
from panpipe.runtimes.diagnose.doctor import CheckedModel
from panpipe.runtimes.launch.team import ThreadTeam
from torch import nn
from torch.nn import functional as F

WIDTH = 8
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*the loss does not depend on it",
    "ignore:microbatches of a new shape",  # the doctor trains other sizes, too
)


class Same(torch.autograd.Function):
    """Returns what it is given, itself; its gradient is doubled."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Model(nn.Module):
    def __init__(self, run) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.b = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.c, self.d, self.e = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.ones(WIDTH))
        self.run = run

    def forward(self, x):
        return self.run(self, x)


def step(model, x):
    return model(x).pow(2).mean()


def batch(rows=6):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0))


def broadcast(m, x):
    h, y = torch.broadcast_tensors(h := m.a(x), m.b(h))
    return m.c(h + y)


def handed_on(m, x):
    h = m.a(x)
    y = Same.apply(h)
    return m.c(m.d(m.b(y)).tanh() + m.e(h).tanh()) + y


def written_after_dropout(m, x):
    h = m.a(x) * 2
    F.dropout(h, 0.5, training=False).mul_(2)
    return m.c(m.d(m.e(h))) + h


def written_after_a_view(m, x):
    h = m.a(x) + 0
    torch.atleast_2d(h).mul_(2)
    return m.c(m.d(m.e(h))) + h


def detached_in_place(m, x):
    h = m.a(x)
    y = m.b(h)
    y.detach_()
    return m.c(y + h) + y


def set_up_once(m, x):
    h = m.a(x)
    if m.count.item() == 0:
        with torch.no_grad():
            m.scale.copy_(h.std(0))
            m.count.fill_(1)
    return m.c(m.b(h / m.scale))


def written_by_its_data(m, x):
    m.scale.data.mul_(0.9).add_(x.detach().mean(0))
    h = m.a(x)
    h.data.mul_(2)
    return m.c(h * m.scale) + m.d.bias.data


def checked_late(m, x):
    torch._check_tensor_all(x < 1e9)
    torch._check_value((x.sum() < 1e9).item())
    return m.c(m.a(x))


def batch_written(m, x):
    x.mul_(2)
    x[:, :2] += 1
    return m.c(m.b(m.a(x))) + x


RUNS = {
    "a batch written in place": batch_written,
    "broadcast_tensors": broadcast,
    "a function that returns its input": handed_on,
    "a write after idle dropout": written_after_dropout,
    "a write after a view that no schema declares": written_after_a_view,
    "detach_": detached_in_place,
    "a write into data": written_by_its_data,
    "checks of values": checked_late,
}


def equals_one_process(checked, *plans):
    """One capture trains by several plans (devices, schedule, chunks)."""
    for devices, *schedule in plans:
        check = checked.check(ThreadTeam(devices), *schedule)
        assert check.distance is not None, check
        assert check.distance.within(1e-12, 1e-12), check


@pytest.mark.parametrize("run", RUNS)
def test_patterns_train_like_one_process(run):
    torch.manual_seed(0)
    equals_one_process(CheckedModel(Model(RUNS[run]).train(), step, batch(), 3), (2, "v-half", 2))


def test_comparison_of_a_computed_number_runs_at_the_end_of_the_step():
    torch.manual_seed(0)
    checked = CheckedModel(Model(set_up_once).train(), step, batch(), 3)
    assert list(checked.operators.step.regions) == ["the end of the step"]
    equals_one_process(checked, (2, "v-half", 2))


def probed(model, x):
    h = model.a(x)
    probe = model.d(model.b(h).tanh())
    return model.c(model.e(h).tanh()).pow(2).mean(), {"probe": probe.mean()}


def compared_without_gradients(model, x):
    h = model.a(x)
    target = model.d(model.b(h).tanh())
    with torch.no_grad():
        target = target.sin()
    return (model.c(model.e(h).tanh()) - target).pow(2).mean()


def weighed_by_the_model(model, x):
    h = model.a(x)
    probe = model.d(model.b(h).tanh())
    return model.c(model.e(h).tanh()).pow(2).mean(), probe.argmax(1).sum() + 1


@pytest.mark.parametrize("step", [probed, compared_without_gradients, weighed_by_the_model])
def test_outputs_without_gradient_and_weighted_losses_equal_one_process(step):
    torch.manual_seed(0)
    equals_one_process(CheckedModel(Model(None).train(), step, batch(8), 4), (3, "v-half", 2))


def test_arithmetic_of_numbers_equals_python():
    def counted(model, x):
        out = model(x)
        before, positive = model.count.item(), (out > 0).sum().item()
        model.count.add_(1)
        sure = (out.sum() < 1e9).item()
        found = {
            "before": before, "tenth": positive * 0.1, "share": positive / 7, "twice": sure + sure,
            "is_float": float(isinstance(out.mean().item(), float)),
        }  # fmt: skip
        return out.pow(2).mean(), found

    torch.manual_seed(0)
    model = Model(lambda m, x: m.c(m.b(m.a(x))))
    captured = capture_step(model, counted, batch(2))
    assert not captured.regions
    values = {n.name: n.meta["val"].dtype for n in captured.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)}
    metrics = captured.outputs.metrics
    assert {name: values.get(metrics[name]) for name in metrics} == {
        "before": torch.int64, "tenth": torch.float64, "share": torch.float64, "twice": torch.int64, "is_float": None,
    }  # fmt: skip
    assert metrics["is_float"] == 1.0


def by_chance(m, x):
    h = m.a(x) * random.random()
    return m.c(h)


def by_numpys_chance(m, x):
    return m.c(m.a(x) + torch.from_numpy(numpy.random.randn(*x.shape)).to(x))


def data_assigned(m, x):
    m.scale.data = m.scale.data * 0.9 + x.detach().mean(0)
    return m.c(m.a(x) * m.scale)


@pytest.mark.parametrize(
    ("run", "why"), [(by_chance, "draws"), (by_numpys_chance, "draws"), (data_assigned, r"assigns \.data")]
)
def test_unsupported_operations_are_refused_with_the_line(run, why):
    with pytest.raises(RequestError, match=rf"test_patterns\.py:\d+.*: the step {why}"):
        capture_step(Model(run), step, batch(2))


def observe(seen, gradient):
    seen.append(gradient.norm())


@pytest.mark.parametrize(
    "hook", [
        lambda m: m.c.weight.register_hook(lambda gradient: 2 * gradient),
        lambda m: m.c.register_full_backward_hook(lambda module, given, made: (made[0] * 2,)),
        lambda m: m.c.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2)),
        lambda m: m.register_full_backward_hook(lambda module, given, made: (made[0] * 2,)),
    ],
)  # fmt: skip
def test_a_hook_that_may_change_a_gradient_is_refused_with_its_line(hook):
    model = Model(lambda m, x: m.c(m.a(x)))
    hook(model)
    with pytest.raises(RequestError, match=r"test_patterns\.py:\d+: .*('c.*|the model) has this hook on its gradient"):
        capture_step(model, step, batch(2))


def test_hook_that_only_observes_is_warned_of():
    model = Model(lambda m, x: m.c(m.a(x)))
    model.c.weight.register_hook(functools.partial(observe, []))
    with pytest.warns(UserWarning, match="a pipeline does not call it"):
        capture_step(model, step, batch(2))


class Looking(nn.Module):
    """Looks words up in two ways, and picks numbers of what it finds."""

    def __init__(self, table=False, bag=False, picking=False) -> None:
        super().__init__()
        self.table, self.bag = nn.Embedding(9, 4, sparse=table), nn.EmbeddingBag(9, 4, sparse=bag)
        self.head, self.picking = nn.Linear(4, 4), picking

    def forward(self, x):
        h = self.head(self.table(x).mean(1) + self.bag(x))
        return torch.gather(h, 1, torch.zeros(h.shape, dtype=torch.int64), sparse_grad=self.picking)


WORDS = torch.arange(18).reshape(6, 3) % 9


@pytest.mark.parametrize(
    ("asks", "who"),
    [
        ({"table": True}, r"module 'table' asks aten\.embedding\.default"),
        ({"bag": True}, r"module 'bag' asks aten\.embedding_bag\.padding_idx"),
        ({"picking": True}, r"the step asks aten\.gather\.default"),
    ],
)
def test_sparse_gradients_are_refused_with_the_line(asks, who):
    captured = capture_step(Looking(**asks), step, WORDS)
    with pytest.raises(RequestError, match=rf"test_patterns\.py:\d+: {who} for sparse gradients: .*sparse=False"):
        operators_of(captured)


def test_a_table_that_is_not_trained_may_be_sparse():
    torch.manual_seed(0)
    model = Looking(table=True)
    model.table.weight.requires_grad_(False)
    check = CheckedModel(model, step, WORDS, 3).check(ThreadTeam(2), "1f1b", 1)
    assert check.distance is not None, check
    assert check.distance.within(1e-12, 1e-12), check
