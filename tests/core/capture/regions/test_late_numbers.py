"""A number that is read from a tensor and passed on: to modules that branch on it, and to what follows an assertion."""

import pytest
import torch
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.errors import RequestError
from torch import Tensor, nn

from ....support.by_stages import compare

WIDTH = 4


class Branching(nn.Module):
    """Computes what a number says."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, number, *, options=None) -> Tensor:
        if number is True or (number is not False and number > 0):
            return self.one(x) * (options or {"scale": 1})["scale"]
        return self.other(x) + number


class Around(nn.Module):
    """Reads a number and gives it to a module."""

    def __init__(self, read):
        super().__init__()
        self.first, self.read, self.inner, self.last = nn.Linear(WIDTH, WIDTH), read, Branching(), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.read(self.inner, x))


READS = {
    "float": lambda inner, x: inner(x, x.sum().item()),
    "integer": lambda inner, x: inner(x, x.argmax().item() - 2),
    "bool": lambda inner, x: inner(x, (x > 0.5).any().item()),
    "by keyword": lambda inner, x: inner(x, number=x.mean().item()),
    "computed with": lambda inner, x: inner(x, 2 * x.sum().item() - 1.5),
    "nested": lambda inner, x: inner(x, 1, options={"scale": x.sum().item()}),
    "used twice": lambda inner, x: inner(inner(x, x.sum().item()), x.min().item()),
}


def the_step(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def batches() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(3, WIDTH, dtype=torch.float64) + shift for shift in (0, 3, -3)]


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(r, marks=pytest.mark.slow) if r in ("by keyword", "computed with", "used twice") else r
        for r in READS
    ],
)
def test_branch_on_a_computed_number_in_a_submodule_equals_eager(read):
    torch.manual_seed(0)
    for real in batches():
        model = Around(READS[read]).double()
        compare(model, the_step, batches()[0], 2, real=real)


def test_computed_number_as_an_attribute_of_a_branching_module_is_refused():
    class Attribute(Around):
        def forward(self, x):
            x = self.first(x)
            self.inner.extra = x.sum().item()
            return self.last(self.inner(x, x.mean().item()))

    with pytest.raises(RequestError, match=r"attribute 'extra'.*pass it as an argument"):
        operators_of(capture_step(Attribute(None).double(), the_step, batches()[0]))


def test_a_module_that_returns_a_number_of_its_values_is_refused_when_it_changes():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.layer(x), (1 if x.sum() > 0 else 2)

    class Returned(nn.Module):
        def __init__(self):
            super().__init__()
            self.counting, self.last = Counting(), nn.Linear(WIDTH, 1)

        def forward(self, x):
            x, count = self.counting(x)
            return self.last(x) * count

    torch.manual_seed(0)
    x = batches()[1]
    compare(Returned().double(), the_step, x, 2)
    with pytest.raises(RequestError, match=r"returns 2 and not 1.*return a tensor"):
        compare(Returned().double(), the_step, x, 2, real=-x)


class Masked(nn.Module):
    """Branches on values; takes no mask of another size."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None and mask.shape != x.shape:
            raise ValueError(f"a mask should be of size {tuple(x.shape)}, but is {tuple(mask.shape)}")
        x = self.layer(x) if mask is None else self.layer(x) * mask
        return x if x.sum() > 0 else x * 2


class OtherwiseWhenCaptured(nn.Module):
    """Passes a mask while it is captured, as libraries do."""

    def __init__(self, width: int, asks):
        super().__init__()
        self.masked, self.last, self.width, self.asks = Masked(), nn.Linear(WIDTH, 1), width, asks

    def forward(self, x: Tensor) -> Tensor:
        mask = x.new_ones(x.shape[0], self.width) if self.asks() else None
        return self.last(self.masked(x, mask))


def test_module_that_fails_only_in_capture_is_refused_with_its_line():
    model = OtherwiseWhenCaptured(WIDTH + 1, torch.compiler.is_compiling).double()
    with pytest.raises(RequestError, match=r"module 'masked'.*a mask should be of size.*is_compiling"):
        capture_step(model, the_step, batches()[0])
