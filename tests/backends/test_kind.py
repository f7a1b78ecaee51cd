"""The description of a backend."""

import pytest
import torch
from panpipe.backends.kind import BackendKind, dtype_name
from panpipe.backends.memcpy import connect
from panpipe.core.errors import RequestError


def test_kind_runs_what_it_connects():
    assert BackendKind("x", "", threads=connect).runs == ("threads",)
    assert BackendKind("x", "", ranks=connect, threads=connect).runs == ("threads", "ranks")
    with pytest.raises(RequestError, match="backend 'x' connects neither threads nor ranks"):
        BackendKind("x", "")


def test_kind_without_float64_is_refused():
    with pytest.raises(RequestError, match="backend 'x' does not send float64: "):
        BackendKind("x", "", threads=connect, dtypes=frozenset({torch.float32, torch.bfloat16}))
    assert dtype_name(torch.bfloat16) == "bfloat16"


def test_kind_is_unavailable_for_the_reason_it_gives_or_the_error_it_raises():
    def broken():
        raise OSError("no driver")

    assert BackendKind("x", "", threads=connect).unavailable is None
    assert BackendKind("x", "", threads=connect, missing=lambda: "no card").unavailable == "no card"
    assert "no driver" in BackendKind("x", "", threads=connect, missing=broken).unavailable
