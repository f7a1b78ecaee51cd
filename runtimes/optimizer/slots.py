"""Memory that buckets of gradients or parameters use in turns, while replicas exchange them."""

import torch
from torch import Tensor

from ...core.plan.sharding import SLOTS


class Slots:
    """Slots of equal size, allocated when they are needed and then kept, `SLOTS` or more if all are in use.

    Args:
        device: of the memory.
        size: bytes of a slot.

    Attributes:
        all: the slots that exist, as bytes.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        self._device, self.size = device, size
        self.all: list[Tensor] = []
        self._free: list[Tensor] = []

    @property
    def has_free(self) -> bool:
        """Whether `take` returns a slot that is free, or one of the first `SLOTS`."""
        return bool(self._free) or len(self.all) < SLOTS

    def take(self) -> Tensor:
        """A slot; another one is allocated if none is free."""
        if self._free:
            return self._free.pop()
        slot = torch.empty(self.size, dtype=torch.uint8, device=self._device)
        self.all.append(slot)
        return slot

    def give_back(self, slot: Tensor) -> None:
        """Free a slot."""
        if any(slot is known for known in self.all):
            self._free.append(slot)

    def drop(self, slot: Tensor) -> None:
        """Forget a slot to which something may still be written."""
        self.all = [known for known in self.all if known is not slot]

    def grow(self, size: int) -> None:
        """Make slots of at least this many bytes, while none is taken."""
        if size > self.size:
            self.size = size
            self.all, self._free = [], []
