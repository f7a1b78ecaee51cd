"""Operators that read values on the host, which a captured graph cannot contain."""

import pytest
import torch
from panpipe.core.capture.programs.programs import host_read, reads_on_host
from torch.fx.experimental.proxy_tensor import make_fx

aten = torch.ops.aten


def of(function, *given):
    traced = make_fx(function, tracing_mode="fake")(*given)
    return host_read(traced.graph.nodes)


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda x: x + 1, None),
        (lambda x: x[torch.tensor([0, 1])], None),
        (lambda x: x.index_put((x[:, 0] > 0,), torch.zeros(())), "aten.index_put.default with a boolean mask"),
        (torch.linalg.inv, "aten._linalg_check_errors.default"),
        (lambda x: x.masked_fill(x > 0, 0), None),
    ],
)
def test_first_operator_that_reads(function, found):
    assert of(function, torch.eye(3)) == found


def test_operators_by_tag_and_other_calls():
    assert reads_on_host(aten.nonzero.default, (torch.ones(2),), {})
    assert reads_on_host(aten._local_scalar_dense.default, (torch.ones(()),), {})
    assert not reads_on_host(print, (), {})
