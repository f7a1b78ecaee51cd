"""A stage's optimizer, of which each replica holds a part (ZeRO-1): a slice of every bucket of gradients.

    REDUCE_GRAD  a reduce-scatter of every bucket: each replica has the sums of its part
    STEP         the optimizer steps slices of the parameters, which are views of the model's own
    UNSHARD      an all-gather of the parameters through the memory of the buckets, where gradients are no longer needed

Slices are of a parameter's elements in the order of memory, in one dimension, so the optimizer's update of an element
must not depend on others (`trials` checks that). A tied weight has a bucket of its own: all stages that read it
then cut it at the same places.

If replicas share gradients, too (ZeRO-2), buckets exist in slots (`gradient_sinks`), and parameters are gathered there.
If they share parameters (ZeRO-3), the slices are of a part of the parameters, and UNSHARD precedes each run of the
stage's actions instead (`shared_parameters`).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...backends.contract import Backend
from ...core.policies.sharding import SLOTS, bucket_bytes
from .buckets import BUCKET_BYTES, Bucket, Gathered, Part, Sharing, Slots, Transfers, divided, in_memory_order
from .gradient_sinks import GradientScatter
from .shared_parameters import SharedParameters

IN_FLIGHT = 2
"""Buckets that are reduced to parts at a time: a transport without its own reduce-scatter receives into further
memory."""
COPIED_BYTES = 1 << 20
"""Most bytes of a bucket of several parameters where replicas share parameters: these are copied after an all-gather,
and larger parameters are not."""


class Shards:
    """The parts of one stage's optimizer and gradients that this replica holds.

    Args:
        size: most bytes of a bucket; by default ``BUCKET_BYTES``, and less for small stages that share gradients.
        frozen: its other parameters, by name, of which each replica has a part if replicas share parameters.

    Attributes:
        buckets: all of the stage; if replicas share gradients, in the order in which they are computed.
        scatter: sums gradients microbatch by microbatch, if replicas share them; else None.
        shared: the parameters, if replicas share these; else None.
        members: names of the parameters of each group of the optimizer, also of those of which this replica has no
            slice.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        sharing: Sharing,
        size: int | None = None,
        frozen: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        self.sharing = sharing
        self.names = {parameter: name for name, parameter in parameters.items()}
        if size is None:
            size = bucket_bytes(sum(p.nbytes for p in self.names)) if sharing.gradients else BUCKET_BYTES
            if sharing.parameters:
                size = min(size, COPIED_BYTES)
        place = {name: at for at, name in enumerate(sharing.order)} if sharing.gradients else {}
        order = sorted(parameters, key=lambda name: place.get(name, len(place)))
        apart = sharing.split or frozenset[str]()
        together = [name for name in order if name not in sharing.tied]
        groups = [[n for n in together if n not in apart], [n for n in together if n in apart]]
        groups += [[name] for name in order if name in sharing.tied]
        of_each = [bucket for names in groups for bucket in divided({n: parameters[n] for n in names}, size)]
        self.buckets = [Bucket(bucket, sharing) for bucket in of_each]
        # A bucket is complete with the last of its gradients.
        self.buckets.sort(key=lambda bucket: max(place.get(name, len(place)) for name in bucket.parameters))
        self.parts = {part.name: part for bucket in self.buckets for part in bucket.parts}
        self.members: list[list[str]] = []
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters.values()}
        self.slots = (sharing.slots or Slots()) if sharing.gradients else None
        self.scatter: GradientScatter | None = None
        if self.slots is not None:
            self.slots.grow(self.buckets)
            self.scatter = GradientScatter(self.buckets, self._bucket_of, self.slots, sharing.replicas)
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
        self.names[parameter] = name
        self.buckets.append(bucket)
        self._bucket_of[parameter] = bucket
        self.parts |= {part.name: part for part in bucket.parts}
        if self.slots is not None:
            self.slots.grow([bucket])

    @property
    def device(self) -> torch.device:
        """The device of the buckets."""
        return self.buckets[0].device if self.buckets else torch.device("cpu")

    @property
    def values(self) -> dict[str, nn.Parameter]:
        """The slices that the optimizer steps, by the names of their parameters."""
        return {name: part.value for name, part in self.parts.items()}

    def reduce(self, replicas: Backend) -> Transfers:
        """Start to sum the gradients to the parts of the replicas; of gradients that were summed by microbatches, to
        agree which parameters have one. The parameters then have no gradient, and the slices have the sums.
        """
        scatter = self.scatter
        here = [p.grad is not None if scatter is None else p in scatter.reached for p in self.names]
        flags = torch.tensor(here, dtype=torch.float32).to(self.device)
        flagged = replicas.all_reduce(flags)

        def end() -> None:
            if scatter is not None:
                scatter.finish()
            flagged.wait()
            self._assign_gradients([True] * len(here) if all(here) else (flags != 0).tolist())

        if scatter is not None:
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
        """Start to gather the parameters of which replicas stepped slices.

        If replicas share gradients, the parameters pass through a few slots, which the stages of a device have
        together; ``wait`` starts the others.
        """
        self.follow()  # no replica may have stepped, so the slices may still be in earlier memory
        for part in self.parts.values():
            part.value.grad = None  # its memory is overwritten, or its sums are used up
        replicas, slots = self.sharing.replicas(), self.slots

        def start(bucket: Bucket) -> Gathered | None:
            if slots is None:
                assert bucket.memory is not None
                return Gathered(bucket.gather(replicas, bucket.memory), partial(bucket.assign, bucket.memory))
            if not slots.has_free:
                return None
            slot = slots.take()
            memory = bucket.memory_in(slot)

            def end() -> None:
                bucket.assign(memory)
                slots.give_back(slot)

            return Gathered(bucket.gather(replicas, memory), end)

        starts = [partial(start, bucket) for bucket in self.buckets]
        if slots is None:
            return Transfers(starts, self.bytes)
        return Transfers(starts, self.bytes, most=SLOTS, make_room=slots.make_room)

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
    if isinstance(state, dict):
        return {key: narrowed(value, part) for key, value in state.items()}
    whole = part.whole
    if not isinstance(state, Tensor) or whole.ndim == 0 or state.shape != whole.shape:
        return state
    ordered = torch.empty_strided(whole.shape, whole.stride(), dtype=state.dtype, device=state.device).copy_(state)
    return in_memory_order(ordered)[part.start : part.stop].clone()
