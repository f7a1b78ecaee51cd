"""A stage's optimizer, of which each replica holds a part (ZeRO-1): a slice of every bucket of gradients.

    bucket       │ gradient │ gradient │     gradient     │  │    n equal parts, wherever they cut a gradient
                 │    replica 0    │    replica 1    │ …
    REDUCE_GRAD  a reduce-scatter of every bucket: each replica has the sums of its part
    STEP         the optimizer steps slices of the parameters, which are views of the model's own
    UNSHARD      an all-gather of the parameters through the memory of the buckets, where gradients are no longer needed

Slices are of a parameter's elements in the order of memory, in one dimension, so the optimizer's update of an element
must not depend on others (`trials` checks that). A tied weight has a bucket of its own: all stages that read it
then cut it at the same places. `sharded_buckets` has the buckets, `shard_transfers` their reduction and all-gather.

If replicas share gradients, too (ZeRO-2), a bucket exists in a slot while its gradients are computed and summed; each
replica keeps its part. See `gradient_scatter`. If they share parameters (ZeRO-3), the slices are of a part of the
parameters, and UNSHARD precedes each run of the stage's actions instead. See `shared_parameters`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ....core.policies.sharding import bucket_bytes
from ..gradient_buckets import BUCKET_BYTES, divided
from .sharded_buckets import Part, ShardedBucket, Sharing, in_memory_order
from .shared_parameters import SharedParameters
from .slots import Slots

COPIED_BYTES = 1 << 20
"""Most bytes of a bucket of several parameters where replicas share parameters: these are copied after an all-gather,
and larger parameters are not."""


class Shards:
    """The parts of one stage's optimizer and gradients that this replica holds.

    Args:
        parameters: the stage's trained ones, by name.
        sharing: how they are shared.
        size: most bytes of a bucket; by default ``BUCKET_BYTES``, and less for small stages that share gradients.
        frozen: its other parameters, by name, of which each replica has a part if replicas share parameters.

    Attributes:
        buckets: all of the stage; if replicas share gradients, in the order in which they are computed.
        bucket_of: the bucket of each parameter.
        slots: memory of buckets, if replicas share gradients.
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
        tied = [name for name in order if name in sharing.tied]
        together = [name for name in order if name not in sharing.tied]
        apart = sharing.split or frozenset[str]()
        self.buckets = [
            ShardedBucket({self.names[p]: p for p in bucket}, sharing)
            for names in ([n for n in together if n not in apart], [n for n in together if n in apart])
            for bucket in divided([parameters[name] for name in names], size)
        ] + [ShardedBucket({name: parameters[name]}, sharing) for name in tied]
        # A bucket is complete with the last of its gradients.
        self.buckets.sort(key=lambda bucket: max(place.get(name, len(place)) for name in bucket.parameters))
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters.values()}
        self.parts = {part.name: part for bucket in self.buckets for part in bucket.parts}
        self.members: list[list[str]] = []
        self.slots = (sharing.slots or Slots()) if sharing.gradients else None
        if self.slots is not None:
            for bucket in self.buckets:
                self.slots.grow(bucket.nbytes, bucket.device)
        self.shared: SharedParameters | None = None
        if sharing.parameters:
            self.shared = SharedParameters([*self.buckets, *_frozen_buckets(frozen or {}, sharing, size)])

    def add(self, name: str, parameter: nn.Parameter) -> None:
        """Train another parameter, in a bucket of its own: the slices of the others stay where they are.

        If replicas share parameters, all of them call this together: its values leave a bucket of frozen ones.
        """
        bucket = ShardedBucket({name: parameter}, self.sharing)
        if self.shared is not None:
            before = next((each for each in self.shared.buckets if name in each.parameters), None)
            left = {} if before is None else {n: p for n, p in before.parameters.items() if n != name}
            after = [ShardedBucket(left, self.sharing, trained=False)] if left else []
            self.shared.divide(before, [bucket, *after], self.sharing.replicas())
        self.names[parameter] = name
        self.buckets.append(bucket)
        self.bucket_of[parameter] = bucket
        self.parts |= {part.name: part for part in bucket.parts}
        if self.slots is not None:
            self.slots.grow(bucket.nbytes, bucket.device)

    def assign_gradients(self, has_one: Sequence[bool]) -> None:
        """Give the slices their sums; the parameters then have no gradient.

        Args:
            has_one: for each parameter of ``names`` whether it has a gradient in any replica.
        """
        for (parameter, name), has in zip(self.names.items(), has_one, strict=True):
            parameter.grad = None
            part = self.parts.get(name)
            if part is not None:
                part.value.grad = part.gradient if has else None

    @property
    def gradients(self) -> dict[nn.Parameter, Tensor]:
        """The tensors in which gradients are accumulated, if replicas share none."""
        return {p: gradient for bucket in self.buckets for p, gradient in bucket.gradients.items()}

    @property
    def values(self) -> dict[str, nn.Parameter]:
        """The slices by the names of their parameters."""
        return {name: part.value for name, part in self.parts.items()}

    def narrow_optimizer(self, optimizer: Optimizer) -> None:
        """Replace the whole parameters in an optimizer by the slices of this replica."""
        self.members += [[] for _ in optimizer.param_groups[len(self.members) :]]
        for group, members in zip(optimizer.param_groups, self.members, strict=True):
            members += [self.names[p] for p in group["params"] if p in self.names]
        narrow(optimizer, {p: self.parts.get(name) for p, name in self.names.items()})

    def follow(self) -> None:
        """Make the slices views of the parameters again, if these were given other memory."""
        if self.shared is not None:
            return
        for part in self.parts.values():
            part.follow()


def _frozen_buckets(frozen: Mapping[str, nn.Parameter], sharing: Sharing, size: int) -> list[ShardedBucket]:
    """The buckets of frozen parameters; empty ones need none."""
    names = {parameter: name for name, parameter in frozen.items() if parameter.numel()}
    buckets = divided(names, size)
    return [ShardedBucket({names[p]: p for p in bucket}, sharing, trained=False) for bucket in buckets]


def narrow(optimizer: Optimizer, parts: Mapping[nn.Parameter, Part | None]) -> None:
    """Replace parameters of an optimizer by slices, with the state that it has already.

    Args:
        optimizer: created with whole parameters.
        parts: parameter → its slice; None removes it.
    """
    for group in optimizer.param_groups:
        names = group.get("param_names", group["params"])
        kept = [(parts[p], name) if p in parts else (p, name) for p, name in zip(group["params"], names, strict=True)]
        kept = [(held, name) for held, name in kept if held is not None]
        group["params"] = [held.value if isinstance(held, Part) else held for held, _ in kept]
        if "param_names" in group:
            group["param_names"] = [name for _, name in kept]
    for parameter, part in parts.items():
        state = optimizer.state.pop(parameter, None)
        if part is not None and state is not None:
            optimizer.state[part.value] = narrowed(state, part)


def narrowed(state: Any, part: Part) -> Any:
    """The part of a parameter's optimizer state: slices of tensors of the parameter's shape, and everything else."""
    if isinstance(state, dict):
        return {key: narrowed(value, part) for key, value in state.items()}
    whole = part.whole
    if not isinstance(state, Tensor) or whole.ndim == 0 or state.shape != whole.shape:
        return state
    ordered = torch.empty_strided(whole.shape, whole.stride(), dtype=state.dtype, device=state.device).copy_(state)
    return in_memory_order(ordered)[part.start : part.stop].clone()
