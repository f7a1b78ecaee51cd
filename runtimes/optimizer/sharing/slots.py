"""Memory that buckets of gradients or parameters use in turns, while replicas exchange them."""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from ....core.policies.sharding import SLOTS


class Slots:
    """Slots of equal size, allocated when they are needed and then kept, `SLOTS` or more if all are in use.

    They have no memory until `grow` is called. The stages of a device use the same ones, as they compute in turns.

    Attributes:
        all: the slots that exist, as bytes.
        in_flight: for each slot from which a sum is in flight, in the order issued, a function that waits for the sum
            and frees the slot.
    """

    def __init__(self) -> None:
        self._device, self._size = torch.device("cpu"), 0
        self.all: list[Tensor] = []
        self.in_flight: deque[Callable[[], None]] = deque()
        self._free: list[Tensor] = []

    @property
    def has_free(self) -> bool:
        """Whether `take` returns a slot that is free, or one of the first `SLOTS`."""
        return bool(self._free) or len(self.all) < SLOTS

    def make_room(self) -> None:
        """Wait for the earliest sums until a slot is free, if there are any: all replicas wait in the same order."""
        while not self.has_free and self.in_flight:
            self.in_flight[0]()

    def take(self) -> Tensor:
        """A slot; another one is allocated if none is free."""
        if self._free:
            return self._free.pop()
        slot = torch.empty(self._size, dtype=torch.uint8, device=self._device)
        self.all.append(slot)
        return slot

    def give_back(self, slot: Tensor) -> None:
        """Free a slot."""
        if any(slot is known for known in self.all):
            self._free.append(slot)

    def drop(self, slot: Tensor) -> None:
        """Forget a slot to which something may still be written."""
        self.all = [known for known in self.all if known is not slot]

    def grow(self, size: int, device: torch.device) -> None:
        """Make slots at least this large, in bytes, and put them on a device; no slot may be in use."""
        if size > self._size:
            self._size, self._device = size, device
            self.all, self._free = [], []
