"""The options of ``panpipe plan`` that describe a request: the same for the command line and the explorer."""

from pathlib import Path

from attrs import frozen

from ...core.policies.sharding import NONE


@frozen(kw_only=True)
class PlanOptions:
    """The options of ``panpipe plan``, whose help texts describe them (``cli/plan``). None is an option not given.

    ``tp`` is not one of them: each number of tensor ranks that it allows has a request of its own.
    """

    cluster: str
    microbatches: int | None = None
    graph: Path | None = None
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
