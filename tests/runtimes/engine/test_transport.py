"""Tensors that a plan sends and its backend cannot move are refused before training."""

from types import SimpleNamespace

import pytest
import torch
from panpipe.backends.kind import BackendKind
from panpipe.backends.memcpy import connect
from panpipe.core.capture.programs.stage import Boundary
from panpipe.core.errors import RequestError
from panpipe.core.plan.plan import TiedWeight
from panpipe.runtimes.engine.transport import check_transport

CPU = {0: torch.device("cpu"), 1: torch.device("cpu")}
FLOATS = BackendKind("floats", "", threads=connect, dtypes=frozenset({torch.float32, torch.float64}))
WEIGHTS = {"w": torch.zeros(1, dtype=torch.bfloat16)}


def plan(placement, data=1, tied=()):
    return SimpleNamespace(placement=placement, mesh=SimpleNamespace(data=data), tied=tied)


def layout(dtype):
    return {(0, 1): (Boundary("x", (2,), dtype, True),)}


def test_tensors_that_stay_on_a_device_may_have_any_dtype():
    check_transport(FLOATS, plan((0, 0), tied=(TiedWeight("w", (0, 1), 2),)), layout(torch.bfloat16), WEIGHTS, CPU)
    check_transport(FLOATS, plan((0, 1)), layout(torch.float32), WEIGHTS, CPU)


@pytest.mark.parametrize(
    ("found", "dtype", "name"),
    [
        (plan((0, 1)), torch.bfloat16, "x"),
        (plan((0, 0), data=2), torch.float32, "w"),
        (plan((0, 1), tied=(TiedWeight("w", (0, 1), 2),)), torch.float32, "w"),
    ],
)
def test_dtype_that_the_backend_does_not_move_is_refused_by_the_tensor(found, dtype, name):
    with pytest.raises(RequestError, match=f"'{name}' goes between devices in bfloat16 and backend 'floats' moves "):
        check_transport(FLOATS, found, layout(dtype), WEIGHTS, CPU)


def test_device_that_the_backend_does_not_serve_is_refused():
    where = {0: torch.device("meta")}
    with pytest.raises(RequestError, match="the model is on meta and backend 'floats' can only move tensors on cpu"):
        check_transport(FLOATS, plan((0,)), {}, {}, where)
