"""Results have the strides that they were traced with, whatever a kernel returns; gradients equal eager's."""

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....support.by_stages import compare, in_one_process

ROWS, TIME, WIDTH = 2, 4, 6

LAYOUTS = {
    "contiguous": lambda x: x,
    "time last": lambda x: x.transpose(1, 2),
    "rows second": lambda x: x.transpose(0, 1),
    "reversed": lambda x: x.permute(2, 1, 0),
    "expanded": lambda x: x.mean(1, keepdim=True).expand(-1, TIME, -1),
    "every other": lambda x: x[:, ::2],
}
"""How (rows, time, width) lies in memory where an operator reads it."""
SLOW = pytest.mark.slow


class AfterLinear(nn.Module):
    """An operator between two linear layers; reads a tensor with any strides, and a reshape reads its result."""

    def __init__(self, layout, operator, like: Tensor):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layout, self.operator = layout, operator(layout(like))
        self.last = nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.operator(self.layout(self.first(x)))
        return self.last(x.reshape(-1, x.shape[-1]).tanh()).transpose(0, 1).reshape(-1)


def of_function(function):
    class Function(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    return lambda x: Function()


OPERATORS = {
    "batch norm": lambda x: nn.BatchNorm1d(x.shape[1]),
    "batch norm, evaluated": lambda x: nn.BatchNorm1d(x.shape[1]).eval(),
    "group norm": lambda x: nn.GroupNorm(1, x.shape[1]),
    "instance norm": lambda x: nn.InstanceNorm1d(x.shape[1], affine=True),
    "layer norm": lambda x: nn.LayerNorm(x.shape[-1]),
    "convolution": lambda x: nn.Conv1d(x.shape[1], 4, 3, padding=1),
    "depthwise convolution": lambda x: nn.Conv1d(x.shape[1], x.shape[1], 3, padding=2, groups=x.shape[1]),
    "transposed convolution": lambda x: nn.ConvTranspose1d(x.shape[1], 4, 3),
    "dropout": lambda x: nn.Dropout(0.5),
    "dropout of channels": lambda x: nn.Dropout1d(0.5),
    "average pool": lambda x: nn.AvgPool1d(2, ceil_mode=True),
    "maximum pool": lambda x: nn.MaxPool1d(2, ceil_mode=True),
    "adaptive pool": lambda x: nn.AdaptiveAvgPool1d(2),
    "linear layer": lambda x: nn.Linear(x.shape[-1], 4),
    "softmax": lambda x: nn.Softmax(1),
    "gated": lambda x: nn.GLU(0),
    "recurrent": lambda x: First(nn.GRU(x.shape[-1], 4, batch_first=True)),
    "attention": lambda x: Attention(),
    "padding": of_function(lambda x: F.pad(x, (1, 2), mode="replicate")),
    "spectrum": of_function(lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1), n=x.shape[1], dim=1)),
    "scan": of_function(lambda x: x.cumsum(0)),
    "sort": of_function(lambda x: x.sort(1).values),
    "gather": of_function(lambda x: x.gather(1, x.argsort(1))),
    "interpolate": of_function(lambda x: F.interpolate(x, scale_factor=2, mode="linear")),
    "product": of_function(lambda x: torch.einsum("abc,adc->dba", x, x)),
    "triangular": of_function(lambda x: x.tril()),
    "factors": of_function(lambda x: torch.linalg.qr(torch.cat([x, x.new_ones(1).expand_as(x)], 1)[..., :2])[0]),
    "image": of_function(lambda x: F.fold(F.unfold(x[:, None], 2), x.shape[1:], 2)[:, 0]),
    "written in place": of_function(lambda x: x.clone().add_(1).mul_(x)),
}


class First(nn.Module):
    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)[0]


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)


def the_step(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x).flatten()
    return (out * torch.arange(out.numel(), dtype=out.dtype).sin()).sum()


def after_operator(operator: str, layout: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(ROWS, TIME, WIDTH, dtype=torch.float64)
    model = AfterLinear(LAYOUTS[layout], OPERATORS[operator], x).double()
    try:
        in_one_process(model, the_step, x)
    except (RuntimeError, ValueError) as error:
        pytest.skip(f"eager PyTorch has no such case: {error}")
    return model, x


ONE_OF_A_KIND = {
    "batch norm", "layer norm", "convolution", "dropout", "maximum pool", "softmax", "attention", "scan", "gather",
    "written in place",
}  # fmt: skip


@pytest.mark.parametrize(
    ("operator", "layout"),
    [
        pytest.param(operator, layout, marks=[] if operator in ONE_OF_A_KIND else SLOW)
        for operator, layout in zip(OPERATORS, itertools.cycle(LAYOUTS), strict=False)
    ],
)
def test_gradients_equal_eager_for_any_input_strides(operator, layout):
    model, x = after_operator(operator, layout)
    compare(model, the_step, x, 3, split=True)


@pytest.mark.slow
@pytest.mark.parametrize(("operator", "layout"), list(itertools.product(OPERATORS, LAYOUTS)))
def test_gradients_equal_eager_for_every_operator_and_layout(operator, layout):
    model, x = after_operator(operator, layout)
    for cuts, options in ((1, {}), (3, {"split": True}), (2, {"recompute": True})):
        compare(copy.deepcopy(model), the_step, x, cuts, **options)


@pytest.mark.parametrize("layout", ["time last", pytest.param("rows second", marks=SLOW)])
@pytest.mark.parametrize("operator", ["batch norm", "convolution", "dropout"])
def test_gradients_equal_eager_if_kernels_return_other_strides(operator, layout):
    model, x = after_operator(operator, layout)
    compare(model, the_step, x, 2, recompute=True)


def test_one_row_has_the_strides_that_were_traced():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Dropout(0.5), nn.Conv2d(4, 1, 1)).double()
    x = torch.randn(1, 3, 6, 5, dtype=torch.float64)
    for image in (x, x.to(memory_format=torch.channels_last), x.transpose(2, 3)):
        compare(copy.deepcopy(model), the_step, image, 2, split=True)


def test_dropout_of_images_with_channels_last():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.5), nn.BatchNorm2d(4), nn.Flatten(2), nn.Linear(16, 2))
    model = model.double().to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64).to(memory_format=torch.channels_last)
    compare(model, the_step, x, 3, split=True)
