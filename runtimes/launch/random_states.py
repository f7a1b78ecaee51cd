"""The states of the random number generators around the building of a pipeline.

Profiles draw random numbers, and ranks profile different stages. Ranks whose generators differ afterwards would draw
different batches.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch


@contextmanager
def random_states_kept() -> Iterator[None]:
    """A context at whose end the generators of torch, numpy and Python are as they were at its start."""
    python, array = random.getstate(), numpy.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(array)
