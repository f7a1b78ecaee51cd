"""Gradients of a stage in buckets, summed over its replicas as PyTorch's DistributedDataParallel does.

The gradients are allocated in the buckets, so that nothing is copied::

    bucket     │ gradient │ gradient │ … │ has one? │        at most BUCKET_BYTES, of one dtype
    REDUCE_GRAD  issues an all-reduce of every bucket; the device continues to compute
    STEP         waits for those of its stage (REDUCE_TIED and SYNC wait for those of all stages)

After the gradients a flag for each parameter records whether it has a gradient here: a region (Python code) may take
another branch in one replica. A parameter without a gradient in any replica keeps ``grad`` None, as in one process.

Where replicas share an optimizer, each sums a part of the gradients instead: see `shards` and `shard_transfers`. What
else replicas exchange is in `replica_values`.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ...backends.contract import Backend, Handle

BUCKET_BYTES = 25 << 20
"""The default of DistributedDataParallel: of 0 to 50 MB, the authors find 10 to 25 MB fastest (Li et al., "PyTorch
Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 5.2). A plan reduces a whole stage
after its last backward, so a bucket's size only limits how much is in flight at a time."""


def fill_with_gradients(memory: Mapping[nn.Parameter, Tensor]) -> None:
    """Copy gradients to their places in a bucket, where they are not there already; a missing one counts as zeros.

    Args:
        memory: each parameter's place.
    """
    for parameter, gradient in memory.items():
        if parameter.grad is None:
            gradient.zero_()
        elif parameter.grad.data_ptr() != gradient.data_ptr():
            gradient.copy_(parameter.grad)


class Bucket:
    """The gradients of some parameters, and a flag for each whether it has one, in one tensor.

    Args:
        parameters: of one dtype and device.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        count = sum(p.numel() for p in parameters)
        first = parameters[0]
        self.memory = torch.empty(count + len(parameters), dtype=first.dtype, device=first.device)
        *parts, self._flags = self.memory.split([*(p.numel() for p in parameters), len(parameters)])
        self.gradients = {p: part.view(p.shape) for p, part in zip(parameters, parts, strict=True)}

    def reduce(self, replicas: Backend) -> Handle:
        """Start to sum the gradients over all replicas; a missing one counts as zeros."""
        fill_with_gradients(self.gradients)
        self._flags.fill_(1.0)
        for number, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                self._flags[number].zero_()
        memory = self.memory
        return replicas.all_reduce(torch.view_as_real(memory).view(-1) if memory.is_complex() else memory)

    def assign_gradients(self) -> None:
        """Set the parameters' gradients to the sums.

        The host waits for the device only if a parameter has no gradient here, and may have one in another replica.
        """
        everywhere = all(parameter.grad is not None for parameter in self.parameters)
        anywhere = [True] * len(self.parameters) if everywhere else (self._flags != 0).tolist()
        for (parameter, gradient), has_one in zip(self.gradients.items(), anywhere, strict=True):
            parameter.grad = gradient if has_one else None


def buckets_of(parameters: Iterable[nn.Parameter], size: int = BUCKET_BYTES) -> list[Bucket]:
    """The buckets of those parameters that are not frozen; arguments as of `divided`."""
    return [Bucket(held) for held in divided((p for p in parameters if p.requires_grad), size)]


def divided(parameters: Iterable[nn.Parameter], size: int = BUCKET_BYTES) -> list[list[nn.Parameter]]:
    """Divide parameters into those of buckets of one dtype, in order; each has as many as fit, and at least one.

    Args:
        parameters: in the order of the buckets.
        size: most bytes of a bucket.
    """
    filling: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    full: list[list[nn.Parameter]] = []
    for parameter in parameters:
        key = parameter.dtype, parameter.device
        held = filling.setdefault(key, [])
        if held and sum(p.nbytes for p in held) + parameter.nbytes > size:
            full.append(held)
            held = filling[key] = []
        held.append(parameter)
    return [*full, *filling.values()]


class Reduction:
    """The reduction of a stage's gradients, in flight.

    Args:
        buckets: all of the stage, each with this device's transport to the replicas over which it is summed.
    """

    def __init__(self, buckets: Sequence[tuple[Bucket, Backend]]) -> None:
        self._buckets = [bucket for bucket, _ in buckets]
        self._handles = [bucket.reduce(replicas) for bucket, replicas in buckets]

    @property
    def bytes(self) -> int:
        """Bytes that are summed."""
        return sum(bucket.memory.nbytes for bucket in self._buckets)

    def watch(self) -> None:
        """Record the end of the reduction in `ended_ns`, if the transport's handles support it."""
        for handle in self._handles:
            if hasattr(handle, "watch"):
                handle.watch()

    @property
    def ended_ns(self) -> int | None:
        """The end of the last sum on the monotonic clock; None without `watch` or the transport's support."""
        ends = [getattr(handle, "ended_ns", None) for handle in self._handles]
        known = [end for end in ends if end is not None]
        return max(known) if known and len(known) == len(ends) else None

    def wait(self) -> None:
        """Return when the parameters have the sums."""
        for handle in self._handles:
            handle.wait()
        for bucket in self._buckets:
            bucket.assign_gradients()
