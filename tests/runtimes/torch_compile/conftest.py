"""What every test of compiled models begins with."""

import warnings

import pytest
import torch
from panpipe.runtimes.torch_compile import backend


@pytest.fixture(autouse=True)
def quiet():
    """Nothing compiled or said before, and no warnings."""
    torch._dynamo.reset()
    backend._warned.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()
