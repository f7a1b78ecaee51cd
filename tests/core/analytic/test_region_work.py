"""Costs of what stays Python come from a run on stand-ins."""

import pytest
import torch
from panpipe.core.analytic import region_work
from panpipe.core.analytic.model import model_work
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.errors import RequestError
from torch import nn


class Twice(nn.Module):
    """Needs a value to go on."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        y = self.inner(x)
        return y if y.sum() > 1e9 else torch.tanh(y)


def operators():
    model = nn.Sequential(nn.Linear(8, 8), Twice(), nn.Linear(8, 8))
    return operators_of(capture_step(model, lambda model, x: model(x).square().mean(), torch.zeros(4, 8)))


def test_region_work_counts_the_operators_of_a_run():
    work = model_work(operators())
    (region,) = (op.work for op in work.operators if "tanh" in [kernel.name for kernel in op.work.forward])
    assert sum(kernel.flops for kernel in region.forward) == 2 * 4 * 8 * 8
    assert "sum" in [kernel.name for kernel in region.forward]
    # Its backward gives all gradients at once: it is one action, I.
    assert sum(kernel.flops for kernel in region.backward_input) == 2 * 2 * 4 * 8 * 8
    assert sum(kernel.flops for kernel in region.backward_weight) == 0
    assert sum(kept.bytes for kept in region.kept) >= 4 * 4 * 8  # the result of tanh at least


def test_a_region_that_is_too_large_to_run_is_refused(monkeypatch):
    monkeypatch.setattr(region_work, "_STAND_INS", 100)
    with pytest.raises(RequestError, match=r"'1' stays Python and reads .* GB: its costs need a run on"):
        model_work(operators())
