"""Where backward programs put the gradients of parameters: in ``grad``, or in slots from which replicas sum them.

Of a stage of which each replica keeps a part of the sums (ZeRO-2), from its backwards to these parts::

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
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...backends.contract import Backend, Handle
from ...core.capture.programs.accumulated_products import accumulate_product, first_product
from ...core.capture.regions.regions import is_no_gradient
from .buckets import Bucket, Slots, Transfers


class GradientSink:
    """The sink of a backward program, which adds gradients at their places.

    Args:
        parameters: whose gradients it gets, by number.
        place: parameter → the place of its gradient, and whether it has a value already. It has one then.
        done: called with a parameter when its gradient is computed, or known to be missing.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        place: Callable[[nn.Parameter], tuple[Tensor, bool]],
        begin: Callable[[Sequence[nn.Parameter]], None] = lambda _: None,
        done: Callable[[nn.Parameter], None] = lambda _: None,
    ) -> None:
        self._parameters, self._place, self._begin, self._done = parameters, place, begin, done

    @classmethod
    def discarding(cls, parameters: Sequence[nn.Parameter]) -> "GradientSink":
        """A sink that runs the same operators and keeps nothing."""
        return cls(parameters, lambda p: (torch.zeros(p.shape, dtype=p.dtype, device=p.device), True))

    def begin(self) -> None:
        """The program begins."""
        self._begin(self._parameters)

    def add(self, number: int, gradient: Tensor) -> None:
        """Add to the gradient of a parameter."""
        parameter = self._parameters[number]
        if not is_no_gradient(gradient):
            place, known = self._place(parameter)
            (place.add_ if known else place.copy_)(gradient)
        self._done(parameter)

    def add_product(self, number: int, left: Tensor, right: Tensor) -> None:
        """Add a product of two matrices to the gradient of a parameter, in one operator."""
        parameter = self._parameters[number]
        place, known = self._place(parameter)
        (accumulate_product if known else first_product)(place, left, right)
        self._done(parameter)

    def totals(self, numbers: Sequence[int]) -> list[Tensor]:
        """The places of gradients, to be added to; zeros in those without a value."""
        places = (self._place(self._parameters[number]) for number in numbers)
        return [place if known else place.zero_() for place, known in places]

    def added(self, numbers: Sequence[int]) -> None:
        """They have been added to."""
        for number in numbers:
            self._done(self._parameters[number])


class _Filling(NamedTuple):
    """The slot of a bucket, the bucket's memory in it, and which of its gradients have a value."""

    slot: Tensor
    memory: Tensor
    has: set[nn.Parameter]


class GradientScatter:
    """Sums the gradients of a stage over its replicas, microbatch by microbatch.

    Attributes:
        reached: the parameters that a backward here computed a gradient of, since `clear`.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        bucket_of: dict[nn.Parameter, Bucket],
        slots: Slots,
        replicas: Callable[[], Backend],
    ) -> None:
        self._buckets, self._bucket_of, self._slots, self._replicas = buckets, bucket_of, slots, replicas
        self._filling: dict[Bucket, _Filling] = {}
        self._in_flight = deque[tuple[Bucket, Tensor, Tensor, Handle]]()
        self._next = 0
        self._left: dict[Bucket, int] = {}
        self._summed: set[Bucket] = set()
        self._apart: dict[nn.Parameter, Tensor] = {}
        self._has_apart: set[nn.Parameter] = set()
        self.reached: set[nn.Parameter] = set()

    @property
    def buffers(self) -> list[Tensor]:
        """All memory of gradients."""
        return [*(bucket.part for bucket in self._buckets), *self._slots.all, *self._apart.values()]

    def sink(self, parameters: Sequence[nn.Parameter], scattered: bool) -> GradientSink:
        """The sink of a backward program.

        Args:
            scattered: whether SCATTER_GRAD directly follows the program.
        """
        if not scattered:
            return GradientSink(parameters, self._place_apart)
        return GradientSink(parameters, self._place, self._begin, self._done)

    def _begin(self, parameters: Sequence[nn.Parameter]) -> None:
        self._left = dict.fromkeys(self._buckets, 0)
        for parameter in parameters:
            self._left[self._bucket_of[parameter]] += 1

    def _place(self, parameter: nn.Parameter) -> tuple[Tensor, bool]:
        """A place in the slot of its bucket."""
        bucket = self._bucket_of[parameter]
        filling = self._filling.get(bucket) or self._fill(bucket)
        known = parameter in filling.has
        filling.has.add(parameter)
        self.reached.add(parameter)
        return bucket.gradient_in(filling.memory, parameter), known

    def _place_apart(self, parameter: nn.Parameter) -> tuple[Tensor, bool]:
        """A place outside of the slots."""
        if parameter not in self._apart:
            self._apart[parameter] = torch.empty_like(parameter, memory_format=torch.contiguous_format)
        known = parameter in self._has_apart
        self._has_apart.add(parameter)
        self.reached.add(parameter)
        return self._apart[parameter], known

    def _done(self, parameter: nn.Parameter) -> None:
        """Sum the buckets that are complete."""
        self._left[self._bucket_of[parameter]] -= 1
        while self._next < len(self._buckets) and not self._left.get(self._buckets[self._next], 0):
            self._sum(self._buckets[self._next])

    def scatter(self) -> Transfers:
        """Start to sum the buckets that were not summed for this microbatch."""
        while self._next < len(self._buckets):
            self._sum(self._buckets[self._next])
        self._next = 0
        return Transfers([], sum(bucket.nbytes for bucket in self._buckets), self.finish)

    def finish(self) -> None:
        """Return when the parts have all sums."""
        while self._in_flight:
            self._finish_earliest()

    def clear(self) -> None:
        """Forget all gradients, also those of a step that failed, whose transfers may never end."""
        if self._filling or self._in_flight:
            self._slots.forget()
        for held in (self._filling, self._in_flight, self._summed, self._has_apart, self.reached):
            held.clear()
        self._next = 0

    def _fill(self, bucket: Bucket) -> _Filling:
        self._slots.make_room()
        slot = self._slots.take()
        filling = self._filling[bucket] = _Filling(slot, bucket.memory_in(slot), set())
        return filling

    def _sum(self, bucket: Bucket) -> None:
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
        self._in_flight.append((bucket, slot, memory, bucket.reduce(self._replicas(), memory)))
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
