"""The description of a backend: its name, where it works, and how to create its ends."""

import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import field, frozen

from ..core.errors import RequestError
from .contract import Backend


def nothing_missing() -> str | None:
    """None: for transports that work everywhere, without limits."""
    return None


@frozen
class BackendKind:
    """A transport that users select by name. Packages add one through the entry-point group ``panpipe.backends``.

    A kind is pickled for other processes, so its functions must be defined at the top level of a module.

    Args:
        name: for ``backend=``.
        summary: one line for lists.
        threads: from a number of devices, creates the ends of a pipeline whose devices are threads of this process.
        ranks: creates this rank's end of a pipeline of ranks; called on all of them with their process group, which
            serves to exchange addresses. A kind has one of the two, or both.
        dtypes: that it can send; None for all. float32 and float64 are required.
        device_types: types of device on which tensors may be.
        detects_dead_peers: whether a wait for a rank whose process died raises WorkerError. If it would wait forever, a
            pipeline detects the death through separate connections between its ranks.
        missing: the reason why it cannot be used on this machine; None if it can.
        limits: its limits on this machine, for users; None for none.
    """

    name: str
    summary: str
    threads: Callable[[int], Sequence[Backend]] | None = field(default=None, kw_only=True)
    ranks: Callable[[Any], Backend] | None = field(default=None, kw_only=True)
    dtypes: frozenset[torch.dtype] | None = field(default=None, kw_only=True)
    device_types: frozenset[str] = field(default=frozenset({"cpu"}), kw_only=True)
    detects_dead_peers: bool = field(default=True, kw_only=True)
    missing: Callable[[], str | None] = field(default=nothing_missing, kw_only=True)
    limits: Callable[[], str | None] = field(default=nothing_missing, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if self.threads is None and self.ranks is None:
            raise RequestError(f"backend '{self.name}' connects neither threads nor ranks: give one of the two")
        lacking = {torch.float32, torch.float64}.difference(self.dtypes or {torch.float32, torch.float64})
        if lacking:
            names = " and ".join(sorted(dtype_name(dtype) for dtype in lacking))
            raise RequestError(f"backend '{self.name}' does not send {names}: losses and times need it; add it")

    @property
    def unavailable(self) -> str | None:
        """The reason why it cannot be used here; None if it can."""
        try:
            return self.missing()
        except Exception as error:
            return f"its function `missing` failed with {error!r}"

    @property
    def runs(self) -> tuple[str, ...]:
        """The kinds of pipelines that it connects: ``threads``, ``ranks``."""
        return ("threads",) * (self.threads is not None) + ("ranks",) * (self.ranks is not None)


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def identity(device: torch.device) -> str:
    """The name of a device on its host; of a GPU by its UUID, independent of CUDA_VISIBLE_DEVICES."""
    if device.type != "cuda":
        return f"{device} of {socket.gethostname()}"
    return f"GPU {getattr(torch.cuda.get_device_properties(device), 'uuid', device)} of {socket.gethostname()}"
