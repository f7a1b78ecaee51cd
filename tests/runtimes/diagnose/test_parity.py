"""How far apart two models are: what counts as rounding, and what cannot be compared."""

import copy
import math

import pytest
import torch
from panpipe.runtimes.diagnose.doctor import TOLERANCES
from panpipe.runtimes.diagnose.parity import Distance, with_gradients
from torch import nn

DOUBLE = TOLERANCES[torch.float64]


def pair(*gradients: list[float], dtype: torch.dtype = torch.float64) -> tuple[nn.ParameterDict, nn.ParameterDict]:
    """A model with these gradients, twice."""
    model = nn.ParameterDict({f"p{i}": torch.zeros(len(values), dtype=dtype) for i, values in enumerate(gradients)})
    other = copy.deepcopy(model)
    for made in (model, other):
        for parameter, values in zip(made.parameters(), gradients, strict=True):
            parameter.grad = torch.tensor(values, dtype=dtype)
    return model, other


def changed(mine: nn.ParameterDict, name: str, by: float) -> None:
    mine[name].grad += by


def test_distance_of_equal_gradients_is_zero():
    assert with_gradients(Distance(), *pair([1.0, 2.0], [0.0])) == Distance(worst={"gradient": "p0"})


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1.0, 1e8])
def test_distance_detects_a_wrong_gradient_among_small_gradients(scale):
    mine, theirs = pair([scale], [2 * scale])
    changed(mine, "p0", 1e-6 * scale)
    assert not with_gradients(Distance(), mine, theirs).within(*DOUBLE)


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1.0, 1e8])
def test_distance_ignores_rounding_of_a_sum_that_cancels(scale):
    mine, theirs = pair([scale], [3e-17 * scale])
    changed(mine, "p1", 1e-16 * scale)
    assert with_gradients(Distance(), mine, theirs).within(*DOUBLE)


def test_distance_detects_a_gradient_that_is_zero_only_in_one_process():
    mine, theirs = pair([0.0])
    changed(mine, "p0", 1e-20)
    assert math.isinf(with_gradients(Distance(), mine, theirs).gradient)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_equal_non_finite_values_count_as_undefined(value):
    found = with_gradients(Distance(), *pair([value, 1.0]))
    assert (found.gradient, found.undefined) == (0.0, 1)
    assert not found.within(*DOUBLE)


@pytest.mark.parametrize(("here", "there"), [(math.nan, 1.0), (1.0, math.nan), (math.inf, -math.inf), (1.0, math.inf)])
def test_non_finite_values_on_one_side_have_infinite_distance(here, there):
    mine, theirs = pair([there])
    mine["p0"].grad.fill_(here)
    assert math.isinf(with_gradients(Distance(), mine, theirs).gradient)
