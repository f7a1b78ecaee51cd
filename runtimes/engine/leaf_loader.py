"""Loads the leaves of a batch that a device reads, a few microbatches before the actions that read them.

    host     load 0, 1, 2 │ F of 0 │ load 3 │ F of 1 │ load 4 │ …

All copies before the first launch would let the device wait for the host.
"""

from collections.abc import Sequence
from typing import Any

from attrs import define, field

from ..devices.compute import ComputeQueue
from .step_data import Leaves

AHEAD = 2
"""Microbatches after the one that is read whose copies are issued."""


@define(eq=False)
class LeafLoader:
    """The leaves of one batch on one device.

    Args:
        queue: of the device.
        microbatches: of the batch.
        reads: for each microbatch the positions of the leaves that the device reads.
    """

    queue: ComputeQueue
    microbatches: Sequence[Leaves]
    reads: Sequence[Sequence[int]]
    _leaves: list[tuple[Any, ...]] = field(factory=list, init=False)
    _loaded: dict[int, Any] = field(factory=dict, init=False)
    _tickets: dict[int, Any] = field(factory=dict, init=False)

    def of(self, microbatch: int) -> tuple[Any, ...]:
        """The leaves of a microbatch; what the caller issues from now on runs after their load."""
        count = len(self._leaves)
        if count <= microbatch + AHEAD and count < len(self.microbatches):
            for _ in range(min(microbatch + AHEAD + 1, len(self.microbatches)) - count):
                self._load_next()
        if self._tickets:
            for m in [m for m in self._tickets if m <= microbatch]:  # shared tensors were loaded with the first
                self.queue.loaded(self._tickets.pop(m))
        return self._leaves[microbatch]

    def _load_next(self) -> None:
        """Load the leaves of the next microbatch, each tensor once."""
        m, loaded = len(self._leaves), self._loaded
        leaves = self.microbatches[m].leaves
        missing = [i for i in self.reads[m] if id(leaves[i]) not in loaded]
        if missing:
            found, ticket = self.queue.load([leaves[i] for i in missing])
            if ticket is not None:
                self._tickets[m] = ticket
            for i, value in zip(missing, found, strict=True):
                loaded[id(leaves[i])] = value
        self._leaves.append(tuple([loaded.get(id(leaf)) for leaf in leaves]))
