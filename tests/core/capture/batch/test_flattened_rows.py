"""The order of rows in flattened dimensions, and operators that pair two orders."""

import pytest
import torch
from panpipe.core.capture.batch.row_rules import POSITIONAL, RowWatch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

PRIME, T = 61, 5


def findings(run):
    """Those of a function of samples first (samples, T) and of positions first (T, samples)."""
    with FakeTensorMode(), RowWatch(PRIME, PRIME, False, False) as watch:
        run(torch.empty(PRIME, T), torch.empty(T, PRIME))
    return list(watch.findings)


PAIRED = {
    "flatten": lambda a, b: a.flatten() + b.flatten(),
    "loss": lambda a, b: F.mse_loss(a.flatten(), b.flatten()),
    "after an operator": lambda a, b: a.flatten().exp() * b.reshape(-1, 1).sin().squeeze(),
    "transposed": lambda a, b: a.flatten() + a.t().reshape(-1),
}
EQUAL = {
    "same": lambda a, b: a.flatten() + a.exp().flatten(),
    "transposed": lambda a, b: a.t().reshape(-1) + b.flatten(),
    "flattened and back": lambda a, b: a.flatten().view(PRIME, T) + b.flatten().view(T, PRIME).t(),
    "repeated, in an order that is not followed": lambda a, b: b.flatten() + b[0].repeat(T),
}


@pytest.mark.parametrize("case", PAIRED)
def test_pairing_rows_in_different_orders_is_positional(case):
    assert POSITIONAL in {kind for kind, _ in findings(PAIRED[case])}


@pytest.mark.parametrize("case", EQUAL)
def test_pairing_rows_in_one_order_is_no_finding(case):
    assert findings(EQUAL[case]) == []
