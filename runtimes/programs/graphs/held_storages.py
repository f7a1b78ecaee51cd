"""The storages that a stage holds for a microbatch: noted while its actions are captured, for steps that replay them.

A replay frees nothing, so nothing there shows when a step frees its saved tensors. A watched step gets stand-ins on the
meta device instead: storages of the same sizes, which live from and until the same actions.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

Held = tuple[tuple[int, int], ...]
"""The number and the bytes of each storage."""


@define(eq=False)
class HeldStorages:
    """The storages that the stages of a device hold.

    Stages may hold the same one: each has one number while it lives.
    """

    _numbers: dict[int, int] = field(factory=dict, init=False)
    _count: int = field(default=0, init=False)
    _stand_ins: "weakref.WeakValueDictionary[int, Tensor]" = field(factory=weakref.WeakValueDictionary, init=False)

    def note(self, tensors: Iterable[Any], ignored: Iterable[int]) -> Held:
        """The storages of tensors, while graphs are captured.

        Args:
            tensors: that a stage holds.
            ignored: identities of storages that are not counted.
        """
        found: dict[int, int] = {}
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in ignored:
                continue
            if key not in self._numbers:
                self._numbers[key] = self._count
                self._count += 1
                weakref.finalize(storage, self._numbers.pop, key, None)
            found[self._numbers[key]] = storage.nbytes()
        return tuple(found.items())

    def stand_ins(self, held: Held) -> list[Tensor]:
        """Tensors that have storages of these sizes, and no memory; the same ones while a caller holds them."""
        found = []
        for number, size in held:
            stand_in = self._stand_ins.get(number)
            if stand_in is None:
                stand_in = self._stand_ins[number] = torch.empty(size, dtype=torch.uint8, device="meta")
            found.append(stand_in)
        return found


@define(eq=False)
class WatchedStorages:
    """What one stage holds in a step that replays graphs.

    Args:
        storages: of the captured step.
    """

    storages: HeldStorages
    _now: dict[int, Held] = field(factory=dict, init=False)
    _watched: dict[int, Sequence[Tensor]] = field(factory=dict, init=False)

    def after(self, microbatch: int, held: Held) -> None:
        """An action of a microbatch has run, after which the stage holds these storages."""
        self._now[microbatch] = held
        if microbatch in self._watched:
            self._watched[microbatch] = self.storages.stand_ins(held)

    def held(self, microbatch: int) -> list[Tensor]:
        """Stand-ins for what it holds, which live as long as it does."""
        found = self._watched[microbatch] = self.storages.stand_ins(self._now.get(microbatch, ()))
        return list(found)
