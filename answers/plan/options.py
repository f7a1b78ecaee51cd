"""The options of ``panpipe plan`` that describe a request: the same for the command line and the explorer."""

import re

from attrs import frozen

from ...core.policies.sharding import NONE

ATTENTION = "attention"
"""Recomputation of the core of attention."""
EVERY = re.compile(r"every:([1-9]\d{0,6})")
"""Recomputation of each n-th layer."""


@frozen(kw_only=True)
class PlanOptions:
    """The options of ``panpipe plan``, whose help texts describe them (``cli/plan``). None is an option not given.

    ``tp`` is not one of them: each number of tensor ranks that it allows has a request of its own.
    """

    cluster: str
    microbatches: int | None = None
    graph: str | None = None
    model: str | None = None
    batch: int | None = None
    sequence: int | None = None
    dtype: str | None = None
    optimizer: str | None = None
    memory_limit: float | None = None
    mesh: str | None = None
    recompute: str | None = None
    offload: str | None = None
    host_memory: float | None = None
    shard: str = NONE
    schedule: str = "auto"
    chunks: int | None = None
    sequence_parallel: bool = False
    kernels: str = "eager"
    tp_overlap: str = "none"
    cp: int = 1
    cp_order: str = "zigzag"
    ep: int = 1
    budget: int | None = None
    seed: int = 0
    layers: bool | None = None
    samples: int | None = None
    tokens: int | None = None

    @property
    def every(self) -> int | None:
        """Each layer after as many computes its forward again; None for none."""
        found = EVERY.fullmatch(self.recompute or "")
        return int(found[1]) if found else None

    @property
    def within(self) -> str:
        """What backwards compute again within stages that do not recompute; empty for nothing."""
        return self.recompute or "" if self.recompute == ATTENTION or self.every else ""
