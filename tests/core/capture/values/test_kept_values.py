"""Values that a step computes and keeps in Python: set up again in each run, only kept, or refused by name."""

import math
import random
import warnings

import pytest
import torch
from panpipe.core.capture.export.step import capture_step
from panpipe.core.errors import RequestError
from torch import nn
from torch.nn import functional as F

WIDTH = 4


def model():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def fit(m, b):
    return F.mse_loss(m(b["x"]), b["y"])


def capture(step, m=None):
    batch = {"x": torch.randn(2, WIDTH), "y": torch.randn(2, WIDTH)}
    return capture_step(m or model(), step, batch)


class Holder:
    pass


def hidden_state_in_a_variable():
    hidden = None

    def step(m, b):
        nonlocal hidden
        x = m(b["x"])
        if hidden is not None:
            x = x + hidden
        hidden = x.detach()
        return F.mse_loss(x, b["y"])

    return step


def hidden_state_in_an_object():
    holder = Holder()
    holder.hidden = None

    def step(m, b):
        x = m(b["x"])
        x = x if holder.hidden is None else x + holder.hidden
        holder.hidden = x.detach()
        return F.mse_loss(x, b["y"])

    return step


def last_loss():
    losses = []

    def step(m, b):
        loss = fit(m, b)
        if losses:
            loss = loss + 0.1 * losses[-1]
        losses.append(loss.item())
        return loss

    return step


def mean_that_is_returned():
    holder = Holder()
    holder.mean = None

    def step(m, b):
        loss = fit(m, b)
        holder.mean = loss.item() if holder.mean is None else 0.9 * holder.mean + 0.1 * loss.item()
        return loss, {"mean": holder.mean}

    return step


def count():
    holder = Holder()
    holder.calls = 0

    def step(m, b):
        holder.calls += 1
        return fit(m, b) * (1.0 if holder.calls < 4 else 0.5)

    return step


def random_number():
    return lambda m, b: fit(m, b) * random.random()


@pytest.mark.parametrize("make", [
    hidden_state_in_a_variable, hidden_state_in_an_object, last_loss, mean_that_is_returned, count, random_number,
])  # fmt: skip
def test_state_that_the_next_run_uses_is_refused_with_its_line(make):
    with pytest.raises(RequestError, match=r"test_kept_values\.py:\d+.*: the step ") as refusal:
        capture(make())
    assert "\n" not in str(refusal.value)


@pytest.mark.filterwarnings("ignore:.*keeps the value that it has now")
def test_losses_that_are_only_kept_are_allowed_and_leave_nothing():
    losses, holder = [], Holder()
    holder.total, holder.count = 0.0, 0

    def step(m, b):
        loss = fit(m, b)
        losses.append(loss.item())
        holder.total += loss.item()
        holder.count += 1
        return loss

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        capture(step)
    assert losses == []
    assert (holder.total, holder.count) == (0.0, 0)
    assert len({str(each.message) for each in found}) == 3


@pytest.mark.filterwarnings("ignore:.*keeps the value that it has now")
def test_numbers_that_one_capture_left_are_only_kept_by_another_one_with_a_module_in_python():
    class Gate(nn.Linear):
        def forward(self, x):
            return super().forward(x + 1 if x.sum() > 0 else x)

    holder = Holder()
    holder.total = 0.0

    def step(m, b):
        loss = fit(m, b)
        holder.total += loss.item()
        return loss

    for middle in (nn.Tanh(), Gate(WIDTH, WIDTH)):
        capture(step, nn.Sequential(nn.Linear(WIDTH, WIDTH), middle, nn.Linear(WIDTH, WIDTH)))


def test_features_that_a_hook_leaves_for_the_step_are_allowed():
    features, m = {}, model()
    m[1].register_forward_hook(lambda module, given, result: features.__setitem__("a", result))
    with pytest.warns(UserWarning, match="'features'"):
        assert capture(lambda m, b: fit(m, b) + features["a"].square().mean(), m).outputs.loss
    assert features == {}


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.size = None, 0
        self.register_buffer("scale", torch.ones(WIDTH), persistent=False)

    def forward(self, x):
        if self.size < len(x):
            self.size = len(x)
            self.table = torch.zeros(self.size, WIDTH)
            self.table[:, ::2] = torch.arange(self.size)[:, None].sin()
            self.table = (self.table * self.scale).to(x)
        return x + self.table[: len(x)]


class OfTheBatch(Positions):
    def forward(self, x):
        if self.table is None:
            self.table = torch.zeros(WIDTH)
            self.table[0] = x.detach().mean()
        return x + self.table


def test_constant_tables_that_a_module_sets_up_are_allowed_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        m = nn.Sequential(nn.Linear(WIDTH, WIDTH), Positions())
        assert capture(fit, m).outputs.loss
    assert (m[1].table, m[1].size) == (None, 0)


def test_tables_of_the_first_batch_are_refused_by_name():
    with pytest.raises(RequestError, match="kept \\(the attribute 'table' of module '1'\\)"):
        capture(fit, nn.Sequential(nn.Linear(WIDTH, WIDTH), OfTheBatch()))


def test_numbers_of_tensors_are_metrics():
    captured = capture(lambda m, b: ((loss := fit(m, b)), {"twice": 2 * loss.item(), "half": loss.item() / 2}))
    assert not captured.regions
    assert sorted(captured.outputs.metrics) == ["half", "twice"]


def test_a_number_that_python_needs_makes_the_end_of_the_step_python():
    captured = capture(lambda m, b: ((loss := fit(m, b)), {"perplexity": math.exp(loss.item())}))
    assert list(captured.regions) == ["the end of the step"]


def test_a_module_that_others_share_keeps_its_tensors_and_leaves_its_attributes_without_a_word():
    class Masked(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer, self.mask = layer, torch.zeros(1)

        def forward(self, x):
            return self.layer(x) * self.mask

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.masked = Masked(self.layer)

        def forward(self, x):
            self.masked.mask = (x > 0).to(x.dtype)
            return self.masked(x)

    m = nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH))
    weight = m[0].layer.weight
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert capture(fit, m).outputs.loss
    assert m[0].layer.weight is weight


def test_communication_in_the_step_is_refused_with_its_line():
    def step(m, b):
        torch.distributed.broadcast(torch.randperm(2), src=0)
        return fit(m, b)

    with pytest.raises(RequestError, match="communicates with other processes"):
        capture(step)
