"""What moves between replicas that share an optimizer: sums of gradients to their parts, parameters back to all."""

import torch
from torch import Tensor

from ....backends.contract import Backend, Handle
from ....core.policies.sharding import SLOTS
from ..gradient_buckets import fill_with_gradients
from .sharded_buckets import ShardedBucket
from .shards import Shards

IN_FLIGHT = 2
"""Buckets that are reduced at a time: a transport without its own reduce-scatter receives into further memory."""


class ShardedReduction:
    """The reduction of a stage's gradients to the parts of the replicas, in flight.

    A few buckets are reduced at a time; `wait` starts the others. A flag for each parameter records whether any
    replica has a gradient, as in `gradient_buckets`.

    Args:
        shards: of the stage.
        replicas: this device's transport to its replicas.
    """

    def __init__(self, shards: Shards, replicas: Backend) -> None:
        self._shards, self._replicas = shards, replicas
        self._here = [p.grad is not None for p in shards.names]
        device = shards.buckets[0].device if shards.buckets else torch.device("cpu")
        self._flags = torch.tensor(self._here, dtype=torch.float32).to(device)
        self._flagged = replicas.all_reduce(self._flags)
        self._left = list(shards.buckets)
        self._in_flight: list[Handle] = []
        self._start()

    @property
    def bytes(self) -> int:
        """Bytes that are summed."""
        return sum(bucket.nbytes for bucket in self._shards.buckets)

    def watch(self) -> None:
        """The end is not recorded: the waiting thread adds the parts."""

    def _start(self) -> None:
        while self._left and len(self._in_flight) < IN_FLIGHT:
            bucket = self._left.pop(0)
            assert bucket.memory is not None
            fill_with_gradients(bucket.gradients)  # a missing one counts as zeros
            self._in_flight.append(bucket.reduce(self._replicas, bucket.memory))

    def wait(self) -> None:
        """Return when the slices of this replica have the sums; the parameters then have no gradient."""
        while self._in_flight:
            self._in_flight.pop(0).wait()
            self._start()
        self._flagged.wait()
        for each in (self._replicas, self._shards.sharing.replicas()):
            each.free_addends()
        anywhere = [True] * len(self._here) if all(self._here) else (self._flags != 0).tolist()
        self._shards.assign_gradients(anywhere)


class Gather:
    """The all-gather of a stage's parameters, in flight.

    If replicas share gradients, the parameters pass through a few slots, which the stages of a device have together;
    `wait` starts the others.

    Args:
        shards: of the stage.
        replicas: this device's transport to its replicas.
    """

    def __init__(self, shards: Shards, replicas: Backend) -> None:
        shards.follow()  # no replica may have stepped, so the slices may still be in earlier memory
        for part in shards.parts.values():
            part.value.grad = None  # its memory is overwritten, or its sums are used up
        self._slots, self._replicas = shards.slots, replicas
        self._left = list(shards.buckets)
        self._in_flight: list[tuple[ShardedBucket, Tensor | None, Tensor, Handle]] = []
        self.bytes = sum(bucket.nbytes for bucket in shards.buckets)
        """Bytes of the parameters."""
        self._start()

    def _start(self) -> None:
        while self._left and (self._slots is None or (len(self._in_flight) < SLOTS and self._slots.has_free)):
            bucket = self._left.pop(0)
            if self._slots is None:
                assert bucket.memory is not None
                slot, memory = None, bucket.memory
            else:
                slot = self._slots.take()
                memory = bucket.memory_in(slot)
            self._in_flight.append((bucket, slot, memory, bucket.gather(self._replicas, memory)))

    def wait(self) -> None:
        """Return when the model has the parameters."""
        while self._in_flight or self._left:
            if not self._in_flight and self._slots is not None:  # another stage has used all slots
                self._slots.make_room()
                self._start()
            bucket, slot, memory, handle = self._in_flight.pop(0)
            handle.wait()
            bucket.assign(memory)
            if slot is not None and self._slots is not None:
                self._slots.give_back(slot)
            self._start()
