"""Python's cyclic garbage collector while much is allocated and little of it is garbage: capture, search, planning.

Its default of a collection every 700 new objects walks all that was imported and captured again and again: a tenth of
the processor time of ``panpipe plan --model llama-7b``.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = 100_000, 20, 100
"""New objects between two collections of the youngest generation, and how many of each generation between two of the
next one (see ``gc.set_threshold``). Half a million small objects that wait are some tens of MB."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect rarely in here; before and after, as it was set. A collector that is off stays off."""
    before = gc.get_threshold()
    if before[0] == 0:
        yield
        return
    gc.set_threshold(*(max(own, ours) for own, ours in zip(before, THRESHOLDS, strict=True)))
    try:
        yield
    finally:
        gc.set_threshold(*before)
