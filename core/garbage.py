"""Fewer runs of Python's cyclic garbage collector during capture, search and simulation, which allocate much and free
little.

By default it runs every 700 new objects and then traverses all imported and captured objects: a tenth of the processor
time of ``panpipe plan --model llama-7b``, and a fifth of that of a capture with symbolic sizes.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = 100_000, 20, 100
"""Arguments of ``gc.set_threshold``: new objects between two collections of the youngest generation, and collections
of each generation between two of the next one. Half a million small uncollected objects are some tens of MB."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect rarely within this context; its end restores the thresholds. A disabled collector stays disabled.

    What was allocated is then in the oldest generation, as if it had been collected: otherwise the first collections
    of the training steps that follow would traverse all of it, for hundreds of milliseconds.
    """
    before = gc.get_threshold()
    if before[0] == 0:
        yield
        return
    gc.set_threshold(*(max(own, ours) for own, ours in zip(before, THRESHOLDS, strict=True)))
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not gc.get_freeze_count():  # the user's frozen objects would no longer be
            gc.freeze()
            gc.unfreeze()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Without the garbage collector: a full collection takes as long as a simulated step, and finds nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
