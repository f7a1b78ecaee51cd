"""Memory that parts which stay Python share with what is around them: written rightly, or refused with the line."""

import pytest
import torch
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.capture.regions.regions import shared_memory
from panpipe.core.errors import RequestError
from panpipe.runtimes.diagnose.doctor import CheckedModel
from panpipe.runtimes.launch.team import ThreadTeam
from torch import nn

WIDTH = 8
pytestmark = pytest.mark.filterwarnings("ignore:.*the loss does not depend on it")


class Looking(nn.Module):
    """Looks at a value, and so stays Python; then does what its caller chose."""

    def __init__(self, inside) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(WIDTH))
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.inside = inside

    def forward(self, x):
        return self.inside(self, x + 1 if x.sum() > 1e9 else x)


class Model(nn.Module):
    def __init__(self, inside, outside) -> None:
        super().__init__()
        self.before, self.looking, self.after = nn.Linear(WIDTH, WIDTH), Looking(inside), nn.Linear(WIDTH, WIDTH)
        self.outside = outside

    def forward(self, x):
        return self.after(self.outside(self, self.before(x)))


def step(model, x):
    return model(x).pow(2).mean()


def batch(rows=6):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0))


def itself(looking, x):
    return x


def part(looking, x):
    return x[:, :4]


def buffer(looking, x):
    return looking.seen


def parameter(looking, x):
    return looking.weight


def twice(looking, x):
    y = 2 * x
    return y, y


def exchanged(looking, x):
    looking.seen.data = 0.9 * looking.seen.data + x.detach().mean(0)
    return x + looking.seen


def averaged(looking, x):
    """Returns the buffer that it writes."""
    looking.seen.mul_(0.9).add_(x.detach().mean(0))
    return looking.seen


def added(model, h):
    return model.looking(h) + h


def result_written(model, h):
    y = model.looking(h)
    with torch.no_grad():
        y.mul_(2)
    return h + y.sum()


def input_written(model, h):
    h = h + 0
    y = model.looking(h)
    h.mul_(2)
    return h + y


def one_written(model, h):
    y, z = model.looking(h)
    y.mul_(2)
    return y + z


def branching_step(model, x):
    """Gives a buffer other data, after the first line that needs a value."""
    h = model.before(x).tanh()
    h = h + 1 if h.sum() > 1e9 else h
    model.looking.seen.data = 0.9 * model.looking.seen.data + h.detach().mean(0)
    return (model.after(h) + model.looking.seen).pow(2).mean()


RIGHT = {
    "its input, read afterwards": (itself, added, step),
    "a buffer's data assigned": (exchanged, added, step),
    "a buffer returned that it writes": (averaged, added, step),
    "a buffer's data assigned at the end of a step": (itself, added, branching_step),
}


@pytest.mark.parametrize("case", RIGHT)
def test_regions_that_write_train_like_one_process(case):
    inside, outside, train = RIGHT[case]
    torch.manual_seed(0)
    checked = CheckedModel(Model(inside, outside), train, batch(), 3)
    assert len(checked.operators.step.regions) == 1
    check = checked.check(ThreadTeam(2), "1f1b", 1)
    assert check.distance is not None, check
    assert check.distance.within(1e-12, 1e-12), check


@pytest.mark.parametrize(
    ("inside", "outside"),
    [
        (itself, result_written), (itself, input_written), (part, result_written), (twice, one_written),
        (buffer, result_written), (parameter, result_written),
    ],
)  # fmt: skip
def test_write_of_a_region_to_shared_memory_is_refused_with_the_line(inside, outside):
    torch.manual_seed(0)
    captured = capture_step(Model(inside, outside), step, batch(2))
    with pytest.raises(RequestError, match=r"test_region_writes\.py:\d+: .* module 'looking'.*return a \.clone\(\)"):
        operators_of(captured)


def test_write_is_refused_if_another_microbatch_shares_the_memory():
    def sometimes(looking, x):
        return x if x.sum() > 0 else 2 * x

    torch.manual_seed(0)
    model = Model(sometimes, input_written)
    nn.init.eye_(model.before.weight)
    nn.init.zeros_(model.before.bias)
    x = torch.cat((-torch.ones(2, WIDTH), torch.ones(2, WIDTH)))
    problem = CheckedModel(model, step, x, 2).check(ThreadTeam(2), "1f1b", 1).problem
    assert "test_region_writes.py" in problem
    assert "the write would not reach both" in problem


@pytest.mark.parametrize(
    ("inside", "why"),
    [
        (lambda looking, x: x.mul_(2), "writes its arguments in place"),
        (lambda looking, x: (setattr(looking.weight, "data", 0.9 * looking.weight.data), x)[1], "parameter 'weight'"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_unsupported_writes_of_a_region_are_refused_with_the_line(inside, why, device):
    model = Model(inside, added).to(device)
    with pytest.raises(RequestError, match=rf"test_region_writes\.py:\d+ in forward: module 'looking' .*{why}"):
        capture_step(model, step, batch(2))


def test_shared_memory_lists_pairs_with_the_first_tensor():
    a, b = torch.ones(4), torch.ones(4)
    pairs = shared_memory([a, None], [b, a[1:], b.view(2, 2), torch.ones(1)])
    assert pairs == [(("read", 0), ("result", 1)), (("result", 0), ("result", 2))]
