"""The sources of the functions that ``torch.fx`` generates for graph modules.

torch keeps each of them, and an entry of ``linecache`` for it, until the process ends: tracebacks have its lines then.
A graph module that only is interpreted or analysed needs none: 0.2 MiB for each pipeline of four small layers.
"""

import linecache
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.fx.graph_module


@contextmanager
def sources_removed() -> Iterator[None]:
    """At the end of this context, remove the sources of the functions that were generated in it."""
    kept: dict[str, Any] = torch.fx.graph_module._loader.eval_cache
    before = set(kept)  # copies, because other threads may generate functions
    try:
        yield
    finally:
        for name in [name for name in list(kept) if name not in before]:
            kept.pop(name, None)
            linecache.cache.pop(name, None)
