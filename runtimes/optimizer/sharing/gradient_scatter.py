"""Gradients of a stage of which each replica keeps a part of the sums (ZeRO-2), from its backwards to these parts.

::

    backward of microbatch m     ... gradient │ gradient ┐ gradient │ gradient ┐ ...   in the order of the buckets
    slots                            bucket 0 fills ─────┴─ is summed ─▶       │
                                                bucket 1 fills ────────────────┴─ is summed ─▶
    parts                                                 + own part of bucket 0    + own part of bucket 1
    SCATTER_GRAD m               sums the buckets that are left; the stage's next backward waits for it
    REDUCE_GRAD                  the replicas agree which parameters have a gradient

1. Every replica sums all buckets once for each microbatch, in the same order, also those without a gradient: a region
   may take another branch, and a replica may have fewer microbatches. It does not matter for which microbatch a
   gradient is summed, if it is summed at all.
2. A bucket is summed within a backward only if SCATTER_GRAD directly follows it. I has no SCATTER_GRAD: what it
   computes (such as gradients of normalization layers) is kept apart, so that it occupies no slots, and is added before
   the next sum of its bucket.
3. A bucket that is complete before an earlier one waits for it. If both slots wait, a third is allocated.
4. The stages of a device use the same slots: each waits for the sums of the stage before it.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ....backends.contract import Backend, Handle
from ....core.capture.programs.accumulated_products import accumulate_product, first_product
from ....core.capture.regions.regions import is_no_gradient
from .sharded_buckets import ShardedBucket
from .shards import Shards


class _Filling(NamedTuple):
    """The slot of a bucket, the bucket's memory in it, and which of its gradients have a value."""

    slot: Tensor
    memory: Tensor
    has: set[nn.Parameter]


class _InFlight(NamedTuple):
    """A bucket that is being summed."""

    bucket: ShardedBucket
    slot: Tensor
    memory: Tensor
    handle: Handle


class GradientScatter:
    """Sums the gradients of a stage over its replicas, microbatch by microbatch.

    Args:
        shards: of the stage; its replicas share gradients.

    Attributes:
        reached: the parameters that a backward here computed a gradient of, since `clear`.
    """

    def __init__(self, shards: Shards) -> None:
        assert shards.slots is not None
        self._shards, self._slots = shards, shards.slots
        self._filling: dict[ShardedBucket, _Filling] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._next = 0
        self._left: dict[ShardedBucket, int] = {}
        self._summed: set[ShardedBucket] = set()
        self._apart: dict[nn.Parameter, Tensor] = {}
        self._has_apart: set[nn.Parameter] = set()
        self.reached: set[nn.Parameter] = set()

    @property
    def buffers(self) -> list[Tensor]:
        """All memory of gradients."""
        return [*(bucket.part for bucket in self._shards.buckets), *self._slots.all, *self._apart.values()]

    def sink(self, parameters: Sequence[nn.Parameter], scattered: bool) -> "ScatteringSink":
        """The sink of a backward program.

        Args:
            parameters: whose gradients it gets, by number.
            scattered: whether SCATTER_GRAD directly follows the program.
        """
        return ScatteringSink(self, parameters, scattered)

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        """A backward begins that computes a gradient of each of these."""
        self._left = dict.fromkeys(self._shards.buckets, 0)
        for parameter in parameters:
            self._left[self._shards.bucket_of[parameter]] += 1

    def place(self, parameter: nn.Parameter) -> tuple[Tensor, bool]:
        """The place of a gradient in the slot of its bucket, and whether it has a value already. It has one then."""
        bucket = self._shards.bucket_of[parameter]
        filling = self._filling.get(bucket) or self._fill(bucket)
        known = parameter in filling.has
        filling.has.add(parameter)
        self.reached.add(parameter)
        return bucket.gradient_in(filling.memory, parameter), known

    def keep_apart(self, parameter: nn.Parameter) -> tuple[Tensor, bool]:
        """As `place`, outside of the slots."""
        if parameter not in self._apart:
            self._apart[parameter] = torch.empty_like(parameter, memory_format=torch.contiguous_format)
        known = parameter in self._has_apart
        self._has_apart.add(parameter)
        self.reached.add(parameter)
        return self._apart[parameter], known

    def done(self, parameter: nn.Parameter) -> None:
        """The backward has computed a gradient, or found that there is none: sum the buckets that are complete."""
        self._left[self._shards.bucket_of[parameter]] -= 1
        buckets, left = self._shards.buckets, self._left
        while self._next < len(buckets) and not left.get(buckets[self._next], 0):
            self._sum(buckets[self._next])

    def scatter(self) -> "Scattered":
        """Start to sum the buckets that were not summed for this microbatch."""
        buckets = self._shards.buckets
        while self._next < len(buckets):
            self._sum(buckets[self._next])
        self._next = 0
        return Scattered(self, sum(bucket.nbytes for bucket in buckets))

    def finish(self) -> None:
        """Return when the parts have all sums."""
        while self._in_flight:
            self._finish_earliest()

    def reduce(self, replicas: Backend) -> "ScatteredReduction":
        """Start to agree which parameters have a gradient, after the last `scatter`."""
        assert not self._filling
        assert not self._has_apart
        return ScatteredReduction(self, self._shards, replicas)

    def clear(self) -> None:
        """Forget all gradients, also those of a step that failed, whose transfers may never end."""
        for filling in self._filling.values():
            self._slots.give_back(filling.slot)
        for flight in self._in_flight:
            self._slots.drop(flight.slot)
            self._slots.in_flight.remove(self._finish_earliest)
        self._filling.clear()
        self._in_flight.clear()
        self._summed.clear()
        self._has_apart.clear()
        self.reached.clear()
        self._next = 0

    def kept(self) -> "KeptSums":
        """The sums so far, to set them again after a step that shall change nothing."""
        return KeptSums({bucket: bucket.part.clone() for bucket in self._summed}, set(self.reached))

    def set(self, kept: "KeptSums") -> None:
        """Set the sums to earlier ones."""
        self.clear()
        for bucket, value in kept.sums.items():
            bucket.part.copy_(value)
        self._summed, self.reached = set(kept.sums), set(kept.reached)

    def _fill(self, bucket: ShardedBucket) -> _Filling:
        self._slots.make_room()
        slot = self._slots.take()
        filling = self._filling[bucket] = _Filling(slot, bucket.memory_in(slot), set())
        return filling

    def _sum(self, bucket: ShardedBucket) -> None:
        """Start to sum a bucket; a missing gradient counts as zeros."""
        slot, memory, has = self._filling.get(bucket) or self._fill(bucket)
        del self._filling[bucket]
        for parameter in bucket.parameters.values():
            place = bucket.gradient_in(memory, parameter)
            if parameter in self._has_apart:
                self._has_apart.remove(parameter)
                if parameter in has:
                    place.add_(self._apart[parameter])
                else:
                    place.copy_(self._apart[parameter])
            elif parameter not in has:
                place.zero_()
        bucket.clear_padding(memory)
        self._in_flight.append(_InFlight(bucket, slot, memory, bucket.reduce(self._shards.sharing.replicas(), memory)))
        self._slots.in_flight.append(self._finish_earliest)
        self._next += 1

    def _finish_earliest(self) -> None:
        """Wait for the earliest sum, and add this replica's part."""
        bucket, slot, memory, handle = self._in_flight.popleft()
        self._slots.in_flight.remove(self._finish_earliest)
        handle.wait()
        if bucket in self._summed:
            bucket.part.add_(memory[bucket.own])
        else:
            bucket.part.copy_(memory[bucket.own])
            self._summed.add(bucket)
        self._slots.give_back(slot)


class KeptSums(NamedTuple):
    """Sums of a `GradientScatter`.

    Args:
        sums: bucket → this replica's part.
        reached: the parameters with a gradient here.
    """

    sums: dict[ShardedBucket, Tensor]
    reached: set[nn.Parameter]


class ScatteringSink:
    """The sink of a backward program whose gradients a `GradientScatter` gets; arguments as of its ``sink``."""

    def __init__(self, scatter: GradientScatter, parameters: Sequence[nn.Parameter], scattered: bool) -> None:
        self._scatter, self._parameters, self._scattered = scatter, parameters, scattered
        self._place = scatter.place if scattered else scatter.keep_apart

    def begin(self) -> None:
        """The program begins."""
        if self._scattered:
            self._scatter.begin(self._parameters)

    def add(self, number: int, gradient: Tensor) -> None:
        """Add to the gradient of a parameter."""
        parameter = self._parameters[number]
        if not is_no_gradient(gradient):
            place, known = self._place(parameter)
            if known:
                place.add_(gradient)
            else:
                place.copy_(gradient)
        self._done(parameter)

    def add_product(self, number: int, left: Tensor, right: Tensor) -> None:
        """Add a product of two matrices to the gradient of a parameter."""
        parameter = self._parameters[number]
        place, known = self._place(parameter)
        if known:
            accumulate_product(place, left, right)
        else:
            first_product(place, left, right)
        self._done(parameter)

    def totals(self, numbers: Sequence[int]) -> list[Tensor]:
        """The places of gradients, to be added to; zeros in those without a value."""
        found = []
        for number in numbers:
            place, known = self._place(self._parameters[number])
            found.append(place if known else place.zero_())
        return found

    def added(self, numbers: Sequence[int]) -> None:
        """They have been added to."""
        for number in numbers:
            self._done(self._parameters[number])

    def _done(self, parameter: nn.Parameter) -> None:
        if self._scattered:
            self._scatter.done(parameter)


class Scattered:
    """The sums of a microbatch, in flight.

    Args:
        scatter: of the stage.
        size: bytes of the gradients.

    Attributes:
        bytes: what is summed.
    """

    def __init__(self, scatter: GradientScatter, size: int) -> None:
        self._scatter, self.bytes = scatter, size

    def wait(self) -> None:
        """Return when the parts have the sums of this microbatch, and of all before it."""
        self._scatter.finish()


class ScatteredReduction:
    """The end of a step's sums: which parameters have a gradient in any replica.

    Args:
        scatter, shards: of the stage.
        replicas: this device's transport to its replicas.
    """

    def __init__(self, scatter: GradientScatter, shards: Shards, replicas: Backend) -> None:
        self._scatter, self._shards = scatter, shards
        self._here = [parameter in scatter.reached for parameter in shards.names]
        self._replicas = replicas
        device = shards.buckets[0].device if shards.buckets else torch.device("cpu")
        self._flags = torch.tensor(self._here, dtype=torch.float32).to(device)
        self._flagged = replicas.all_reduce(self._flags)

    @property
    def bytes(self) -> int:
        """Bytes that are summed."""
        return self._flags.nbytes

    def watch(self) -> None:
        """The end is not recorded: the waiting thread adds the parts."""

    def wait(self) -> None:
        """Return when the slices of this replica have the sums."""
        self._scatter.finish()
        self._flagged.wait()
        self._replicas.free_addends()
        anywhere = [True] * len(self._here) if all(self._here) else (self._flags != 0).tolist()
        self._shards.assign_gradients(anywhere)
