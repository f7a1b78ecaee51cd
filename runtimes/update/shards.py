"""A stage's optimizer, of which each replica holds a part (ZeRO-1): a slice of every bucket of gradients.

    REDUCE_GRAD  a reduce-scatter of every bucket: each replica has the sums of its part
    STEP         the optimizer steps slices of the parameters, which are views of the model's own
    UNSHARD      an all-gather of the parameters through the memory of the buckets, where gradients are no longer needed

Slices are of a parameter's elements in the order of memory, in one dimension, so the optimizer's update of an element
must not depend on others (`trials` checks that). A tied weight has a bucket of its own: all stages that read it
then cut it at the same places.

If replicas share gradients, too (ZeRO-2), buckets exist in slots. From the backwards of a stage to its parts::

    backward of microbatch m     ... gradient │ gradient ┐ gradient │ gradient ┐ ...   in the order of the buckets
    slots                            bucket 0 fills ─────┴─ is summed ─▶       │
                                                bucket 1 fills ────────────────┴─ is summed ─▶
    parts                                                 + own part of bucket 0    + own part of bucket 1
    SCATTER_GRAD m               sums the buckets that are left; the stage's next backward waits for it
    REDUCE_GRAD                  the replicas agree which parameters have a gradient
    UNSHARD                      gathers the parameters in the slots

1. Every replica sums all buckets once for each microbatch, in the same order, also those without a gradient: a region
   may take another branch, and a replica may have fewer microbatches. It does not matter for which microbatch a
   gradient is summed, if it is summed at all.
2. A bucket is summed within a backward only if SCATTER_GRAD directly follows it. I has no SCATTER_GRAD: what it
   computes (such as gradients of normalization layers) is kept apart, so that it occupies no slots, and is added before
   the next sum of its bucket.
3. A bucket that is complete before an earlier one waits for it. If both slots wait, a third is allocated.
4. The stages of a device use the same slots: each waits for the transfers of the stage before it.

If they share parameters (ZeRO-3), the slices are of a part of the parameters, and UNSHARD precedes each run of the
stage's actions instead (`shared_parameters`).
"""

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from ...backends.contract import Backend
from ...core.policies.sharding import bucket_bytes
from .buckets import BUCKET_BYTES, Bucket, GradientSink, Part, Sharing, Slots, Transfers, divided, in_memory_order
from .shared_parameters import SharedParameters

IN_FLIGHT = 2
"""Buckets that are reduced to parts at a time: a transport without its own reduce-scatter receives into further
memory."""
COPIED_BYTES = 1 << 20
"""Most bytes of a bucket of several parameters where replicas share parameters: these are copied after an all-gather,
and larger parameters are not."""


class _Filling(NamedTuple):
    """The slot of a bucket, the bucket's memory in it, and which of its gradients have a value."""

    slot: Tensor
    memory: Tensor
    has: set[nn.Parameter]


class Shards:
    """The parts of one stage's optimizer and gradients that this replica holds.

    Args:
        frozen: its other parameters, by name, of which each replica has a part if replicas share parameters.

    Attributes:
        buckets: all of the stage; if replicas share gradients, in the order in which they are computed.
        reached: if replicas share gradients, the parameters that a backward here computed one of since `clear`.
        shared: the parameters, if replicas share these; else None.
        members: names of the parameters of each group of the optimizer, also of those of which this replica has no
            slice.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        sharing: Sharing,
        frozen: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        self.sharing = sharing
        size = bucket_bytes(sum(p.nbytes for p in parameters.values())) if sharing.gradients else BUCKET_BYTES
        size = min(size, COPIED_BYTES) if sharing.parameters else size
        place = {name: at for at, name in enumerate(sharing.order)} if sharing.gradients else {}
        order = sorted(parameters, key=lambda name: place.get(name, len(place)))
        apart = sharing.split or frozenset[str]()
        together = [name for name in order if name not in sharing.tied]
        groups = [[n for n in together if n not in apart], [n for n in together if n in apart]]
        groups += [[name] for name in order if name in sharing.tied]
        of_each = [bucket for names in groups for bucket in divided({n: parameters[n] for n in names}, size)]
        # A bucket is complete with the last of its gradients.
        of_each.sort(key=lambda bucket: max(place.get(name, len(place)) for name in bucket))
        self.buckets: list[Bucket] = []
        self.names: dict[nn.Parameter, str] = {}
        self.parts: dict[str, Part] = {}
        self.members: list[list[str]] = []
        self._bucket_of: dict[nn.Parameter, Bucket] = {}
        self.slots = (sharing.slots or Slots()) if sharing.gradients else None
        for bucket in of_each:
            self._hold(Bucket(bucket, sharing))
        self._filling: dict[Bucket, _Filling] = {}
        self._sums = deque[Transfers]()
        self._next = 0
        self._left: dict[Bucket, int] = {}
        self._summed: set[Bucket] = set()
        self._apart: dict[nn.Parameter, Tensor] = {}
        self._has_apart: set[nn.Parameter] = set()
        self.reached: set[nn.Parameter] = set()
        self.shared: SharedParameters | None = None
        if sharing.parameters:  # empty frozen ones need no bucket
            others = divided({name: p for name, p in (frozen or {}).items() if p.numel()}, size)
            self.shared = SharedParameters([*self.buckets, *(Bucket(own, sharing, trained=False) for own in others)])

    def add(self, name: str, parameter: nn.Parameter) -> None:
        """Train another parameter, in a bucket of its own: the slices of the others stay where they are.

        If replicas share parameters, all of them call this together: its values leave a bucket of frozen ones.
        """
        bucket = Bucket({name: parameter}, self.sharing)
        if self.shared is not None:
            self.shared.move(name, bucket, self.sharing.replicas())
        self._hold(bucket)

    def _hold(self, bucket: Bucket) -> None:
        self.buckets.append(bucket)
        self.parts |= {part.name: part for part in bucket.parts}
        for name, parameter in bucket.parameters.items():
            self.names[parameter], self._bucket_of[parameter] = name, bucket
        if self.slots is not None:
            self.slots.grow(bucket)

    @property
    def device(self) -> torch.device:
        """The device of the buckets."""
        return self.buckets[0].device if self.buckets else torch.device("cpu")

    @property
    def values(self) -> dict[str, nn.Parameter]:
        """The slices that the optimizer steps, by the names of their parameters."""
        return {name: part.value for name, part in self.parts.items()}

    @property
    def buffers(self) -> list[Tensor]:
        """All memory of gradients."""
        if self.slots is None:
            return [bucket.memory for bucket in self.buckets if bucket.memory is not None]
        return [*(bucket.part for bucket in self.buckets), *self.slots.all, *self._apart.values()]

    def sink(self, parameters: Sequence[nn.Parameter], scattered: bool) -> GradientSink:
        """The sink of a backward program, if replicas share gradients.

        Args:
            scattered: whether SCATTER_GRAD directly follows the program.
        """
        if not scattered:
            return GradientSink(parameters, self._place_apart)
        return GradientSink(parameters, self._place, self._begin, self._done)

    def _begin(self, parameters: Sequence[nn.Parameter]) -> None:
        self._left = dict.fromkeys(self.buckets, 0)
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
        while self._next < len(self.buckets) and not self._left.get(self.buckets[self._next], 0):
            self._sum_next()

    def _fill(self, bucket: Bucket) -> _Filling:
        assert self.slots is not None
        slot = self.slots.take()
        filling = self._filling[bucket] = _Filling(slot, bucket.memory_in(slot), set())
        return filling

    def _sum_next(self) -> None:
        """Start to sum the next bucket; a missing gradient counts as zeros."""
        assert self.slots is not None
        bucket = self.buckets[self._next]
        slot, memory, has = self._filling.get(bucket) or self._fill(bucket)
        del self._filling[bucket]
        for parameter in bucket.parameters.values():
            place = bucket.gradient_in(memory, parameter)
            if parameter in self._has_apart:
                self._has_apart.remove(parameter)
                (place.add_ if parameter in has else place.copy_)(self._apart[parameter])
            elif parameter not in has:
                place.zero_()
        bucket.clear_padding(memory)
        start = partial(bucket.reduce, self.sharing.replicas(), memory)
        self._sums.append(self.slots.transfer(slot, start, partial(self._add_part, bucket, memory)))
        self._next += 1

    def _add_part(self, bucket: Bucket, memory: Tensor) -> None:
        """Add this replica's part of a sum."""
        (bucket.part.add_ if bucket in self._summed else bucket.part.copy_)(memory[bucket.own])
        self._summed.add(bucket)

    def scatter(self) -> Transfers:
        """Start to sum the buckets that were not summed for this microbatch."""
        while self._next < len(self.buckets):
            self._sum_next()
        self._next = 0
        return Transfers([], self.bytes, self._finish)

    def _finish(self) -> None:
        """Return when the parts have all sums."""
        while self._sums:
            self._sums.popleft().wait()

    def clear(self) -> None:
        """Forget all gradients, also those of a step that failed, whose transfers may never end."""
        if self.slots is not None:
            self.slots.forget_used()
        for held in (self._filling, self._sums, self._summed, self._has_apart, self.reached):
            held.clear()
        self._next = 0

    def reduce(self, replicas: Backend) -> Transfers:
        """Start to sum the gradients to the parts of the replicas; of gradients that were summed by microbatches, to
        agree which parameters have one. The parameters then have no gradient, and the slices have the sums.
        """
        here = [p in self.reached if self.sharing.gradients else p.grad is not None for p in self.names]
        flags = torch.tensor(here, dtype=torch.float32).to(self.device)
        flagged = replicas.all_reduce(flags)

        def end() -> None:
            self._finish()
            flagged.wait()
            self._assign_gradients([True] * len(here) if all(here) else (flags != 0).tolist())

        if self.sharing.gradients:
            return Transfers([], flags.nbytes, end)
        sums = [partial(bucket.reduce_collected, replicas) for bucket in self.buckets]
        return Transfers(sums, self.bytes, end, IN_FLIGHT)

    @property
    def bytes(self) -> int:
        """Bytes of the buckets."""
        return sum(bucket.nbytes for bucket in self.buckets)

    def _assign_gradients(self, has_one: Sequence[bool]) -> None:
        """Give the slices their sums; ``has_one`` is for each parameter whether it has a gradient in any replica."""
        for (parameter, name), has in zip(self.names.items(), has_one, strict=True):
            parameter.grad = None
            part = self.parts.get(name)
            if part is not None:
                part.value.grad = part.gradient if has else None

    def gather(self) -> Transfers:
        """Start to gather the parameters of which replicas stepped slices; where these share gradients, in slots."""
        self.follow()  # no replica may have stepped, so the slices may still be in earlier memory
        for part in self.parts.values():
            part.value.grad = None  # its memory is overwritten, or its sums are used up
        replicas, slots = self.sharing.replicas(), self.slots

        def start(bucket: Bucket) -> Transfers:
            slot = None if slots is None else slots.take()
            memory = bucket.memory if slot is None else bucket.memory_in(slot)
            assert memory is not None
            gather, end = partial(bucket.gather, replicas, memory), partial(bucket.assign, memory)
            return Transfers([gather], end=end) if slots is None or slot is None else slots.transfer(slot, gather, end)

        return Transfers([partial(start, bucket) for bucket in self.buckets], self.bytes)

    def narrow_optimizer(self, optimizer: Optimizer) -> None:
        """Replace the whole parameters in an optimizer by the slices of this replica, with the state that it has."""
        self.members += [[] for _ in optimizer.param_groups[len(self.members) :]]
        for group, members in zip(optimizer.param_groups, self.members, strict=True):
            members += [self.names[p] for p in group["params"] if p in self.names]
            names = group.get("param_names", group["params"])
            pairs = [(self._held(p), name) for p, name in zip(group["params"], names, strict=True)]
            pairs = [(held, name) for held, name in pairs if held is not None]
            group["params"] = [held for held, _ in pairs]
            if "param_names" in group:
                group["param_names"] = [name for _, name in pairs]
        for parameter, name in self.names.items():
            state, part = optimizer.state.pop(parameter, None), self.parts.get(name)
            if part is not None and state is not None:
                optimizer.state[part.value] = narrowed(state, part)

    def _held(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """This replica's slice of a parameter, or None; the argument itself if it is a slice already."""
        if parameter not in self.names:
            return parameter
        part = self.parts.get(self.names[parameter])
        return None if part is None else part.value

    def follow(self) -> None:
        """Make the slices views of the parameters again, if these were given other memory."""
        for part in self.parts.values() if self.shared is None else ():
            part.follow()


def narrowed(state: Any, part: Part) -> Any:
    """The part of a parameter's optimizer state: slices of tensors of the parameter's shape, and everything else."""
    whole = part.whole

    def slice_of(tensor: Tensor) -> Tensor:
        if whole.ndim == 0 or tensor.shape != whole.shape:
            return tensor
        ordered = torch.empty_strided(whole.shape, whole.stride(), dtype=tensor.dtype, device=tensor.device)
        return part.slice_of(in_memory_order(ordered.copy_(tensor))).clone()

    return tree_map_only(Tensor, slice_of, state)
