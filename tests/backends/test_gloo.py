"""What gloo's handles keep."""

import gc
import weakref
from typing import Any

import torch
from panpipe.backends.gloo import _Sent


class Work:
    """Keeps its tensor, as gloo's does."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def wait(self) -> None:
        pass


def test_a_handle_lets_go_of_its_tensors_when_it_was_waited_for():
    """A trace keeps handles for the times of their transfers; saved tensors must not live on in them."""
    tensor = torch.zeros(4)
    alive = weakref.ref(tensor)
    handle = _Sent([Work(tensor)], 1)
    del tensor
    assert alive() is not None
    handle.wait()
    gc.collect()
    assert alive() is None
    handle.wait()
