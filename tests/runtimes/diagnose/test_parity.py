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


def test_equalwith_gradients_are_no_distance_apart():
    assert with_gradients(Distance(), *pair([1.0, 2.0], [0.0])) == Distance(worst={"gradient": "p0"})


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1.0, 1e8])
def test_a_wrong_gradient_is_found_however_small_thewith_gradients_of_the_model_are(scale):
    mine, theirs = pair([scale], [2 * scale])
    changed(mine, "p0", 1e-6 * scale)
    assert not with_gradients(Distance(), mine, theirs).within(*DOUBLE)


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1.0, 1e8])
def test_rounding_of_a_sum_that_cancels_is_no_difference(scale):
    mine, theirs = pair([scale], [3e-17 * scale])
    changed(mine, "p1", 1e-16 * scale)
    assert with_gradients(Distance(), mine, theirs).within(*DOUBLE)


def test_a_gradient_that_is_zero_in_one_process_alone_is_found():
    mine, theirs = pair([0.0])
    changed(mine, "p0", 1e-20)
    assert math.isinf(with_gradients(Distance(), mine, theirs).gradient)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_in_both_is_equal_and_proves_nothing(value):
    found = with_gradients(Distance(), *pair([value, 1.0]))
    assert (found.gradient, found.undefined) == (0.0, 1)
    assert not found.within(*DOUBLE)


@pytest.mark.parametrize(("here", "there"), [(math.nan, 1.0), (1.0, math.nan), (math.inf, -math.inf), (1.0, math.inf)])
def test_what_is_not_finite_in_one_alone_is_infinitely_far(here, there):
    mine, theirs = pair([there])
    mine["p0"].grad.fill_(here)
    assert math.isinf(with_gradients(Distance(), mine, theirs).gradient)
