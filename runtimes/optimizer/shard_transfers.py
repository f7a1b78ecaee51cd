"""What moves between replicas that share an optimizer: sums of gradients to their parts, parameters back to all."""

import torch

from ...backends.contract import Backend, Handle
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
        device = shards.buckets[0].memory.device if shards.buckets else torch.device("cpu")
        self._flags = torch.tensor(self._here, dtype=torch.float32).to(device)
        self._flagged = replicas.all_reduce(self._flags)
        self._left = list(shards.buckets)
        self._flying: list[Handle] = []
        self._start()

    @property
    def bytes(self) -> int:
        """Bytes that are summed."""
        return sum(bucket.memory.nbytes for bucket in self._shards.buckets)

    def watch(self) -> None:
        """The end is not recorded: the waiting thread adds the parts."""

    def _start(self) -> None:
        while self._left and len(self._flying) < IN_FLIGHT:
            self._flying.append(self._left.pop(0).reduce(self._replicas))

    def wait(self) -> None:
        """Return when the slices of this replica have the sums; the parameters then have no gradient."""
        while self._flying:
            self._flying.pop(0).wait()
            self._start()
        self._flagged.wait()
        anywhere = [True] * len(self._here) if all(self._here) else (self._flags != 0).tolist()
        for (parameter, name), has_one in zip(self._shards.names.items(), anywhere, strict=True):
            parameter.grad = None
            part = self._shards.parts.get(name)
            if part is not None:
                part.value.grad = part.gradient if has_one else None


class Gather:
    """The all-gather of a stage's parameters, in flight.

    Args:
        shards: of the stage.
        replicas: this device's transport to its replicas.
    """

    def __init__(self, shards: Shards, replicas: Backend) -> None:
        shards.follow()  # no replica may have stepped, so the slices may still be in earlier memory
        for part in shards.parts.values():
            part.value.grad = None  # its memory is overwritten
        self._buckets = list(shards.buckets)
        self._handles = [bucket.gather(replicas) for bucket in self._buckets]

    @property
    def bytes(self) -> int:
        """Bytes of the parameters."""
        return sum(bucket.memory.nbytes for bucket in self._buckets)

    def wait(self) -> None:
        """Return when the model has the parameters."""
        for handle, bucket in zip(self._handles, self._buckets, strict=True):
            handle.wait()
            bucket.assign()
        self._handles, self._buckets = [], []
