"""Threads of one process train exactly as one process does."""

import pytest
import torch
from panpipe.runtimes.launch.team import ThreadTeam

from ..support.models import CASES
from ..support.parity import EVERYWHERE, PLANS, SOME, assert_equal, distance

FIRST, *OTHERS = CASES


def is_fast(name: str, devices: int, plan: str) -> bool:
    """Every schedule with the first case, and each other case under two plans that differ most."""
    if devices == 3:
        return name == FIRST and plan in SOME
    return name == FIRST or plan in ("split backward", "recompute in a v")


@pytest.mark.parametrize(
    ("name", "devices", "plan"),
    [
        pytest.param(name, devices, plan, marks=[] if is_fast(name, devices, plan) else [pytest.mark.slow])
        for name in CASES
        for devices in (2, 3)
        for plan in PLANS
    ],
)
def test_float64_training_equals_eager(name, devices, plan):
    assert_equal(distance(ThreadTeam(devices), name, torch.float64, 8, 4, **PLANS[plan]))


@pytest.mark.cuda
@pytest.mark.parametrize("plan", EVERYWHERE)
@pytest.mark.parametrize("name", CASES)
def test_two_stages_on_one_gpu(name, plan):
    found = distance(ThreadTeam(2), name, torch.float64, 8, 4, device="cuda", **PLANS[plan])
    assert found["loss"] < 1e-12
    assert_equal(found, 1e-10)


@pytest.mark.parametrize("name", [FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_float32_gradients_equal_eager_up_to_rounding(name):
    assert distance(ThreadTeam(2), name, torch.float32, 8, 4)["gradient"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "microbatches"), [(10, 4), (5, 5), (3, 1)])
@pytest.mark.parametrize("name", CASES)
def test_uneven_microbatches_are_weighted_by_their_size(name, rows, microbatches):
    assert_equal(distance(ThreadTeam(2), name, torch.float64, rows, microbatches))
