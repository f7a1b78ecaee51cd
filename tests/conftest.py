"""What all tests share: one thread per process, so that sums are the same everywhere."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)
