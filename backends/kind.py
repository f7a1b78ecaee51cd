"""Backends as users ask for them: a name, where the transport works, and how its ends are made."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import field, frozen

from ..core.errors import RequestError
from .contract import Backend


def nothing_missing() -> str | None:
    """For transports that work everywhere, without limits."""
    return None


@frozen
class BackendKind:
    """A transport that users ask for by name. Packages add one through the entry-point group ``panpipe.backends``.

    A kind travels to other processes: its functions are defined at the top of a module.

    Args:
        name: for ``backend=``.
        summary: one line about it.
        threads: makes the ends of a pipeline whose devices are threads of this process, from their number.
        ranks: makes this rank's end of a pipeline of ranks; called on all of them at once with their process group,
            which is there for agreeing on how to connect. A kind has one of the two, or both.
        dtypes: what it moves; None for all. float32 and float64 are always among them.
        device_types: where the tensors may be.
        misses_the_dead: whether those who wait for a rank whose process died raise WorkerError; where they would wait
            on, a pipeline's ranks still miss it, by connections beside the transport.
        missing: why it cannot be used on this machine; None where it can.
        limits: what users should know of it on this machine, where it can be used; None for nothing.
    """

    name: str
    summary: str
    threads: Callable[[int], Sequence[Backend]] | None = field(default=None, kw_only=True)
    ranks: Callable[[Any], Backend] | None = field(default=None, kw_only=True)
    dtypes: frozenset[torch.dtype] | None = field(default=None, kw_only=True)
    device_types: frozenset[str] = field(default=frozenset({"cpu"}), kw_only=True)
    misses_the_dead: bool = field(default=True, kw_only=True)
    missing: Callable[[], str | None] = field(default=nothing_missing, kw_only=True)
    limits: Callable[[], str | None] = field(default=nothing_missing, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if self.threads is None and self.ranks is None:
            raise RequestError(f"backend '{self.name}' connects neither threads nor ranks: give one of the two")
        lacking = {torch.float32, torch.float64}.difference(self.dtypes or {torch.float32, torch.float64})
        if lacking:
            names = " and ".join(sorted(dtype_name(dtype) for dtype in lacking))
            raise RequestError(f"backend '{self.name}' does not move {names}: losses and times travel so; add it")

    @property
    def unavailable(self) -> str | None:
        """Why it cannot be used here; None where it can."""
        try:
            return self.missing()
        except Exception as error:
            return f"asking whether it works here failed with {error!r}"

    @property
    def runs(self) -> tuple[str, ...]:
        """What the devices of its pipelines may be: ``threads``, ``ranks``."""
        return ("threads",) * (self.threads is not None) + ("ranks",) * (self.ranks is not None)


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
