"""Gradients of a stage in buckets, summed over its replicas as PyTorch's DistributedDataParallel does.

The gradients stand in the buckets from the beginning, so that nothing is copied::

    bucket     │ gradient │ gradient │ … │ has one? │        at most BUCKET_BYTES, of one dtype
    REDUCE_GRAD  an all-reduce of every bucket is issued, and the device computes on
    STEP         waits for those of its stage (REDUCE_TIED and SYNC for those of all stages)

Behind the gradients stands for each parameter whether it has one here: a region of Python may take another way in one
replica, and a parameter that no replica has a gradient for keeps none, as in one process.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ...backends.contract import Backend, Handle

BUCKET_BYTES = 25 << 20
"""The default of DistributedDataParallel: of 0 to 50 MB, the authors find 10 to 25 MB fastest (Li et al., "PyTorch
Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 5.2). A plan reduces a stage at
once, when its last backward is through, so a bucket's size decides only how much is in flight at a time."""


class Bucket:
    """The gradients of some parameters, and whether they have one, in one piece of memory.

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
        """Sum the gradients that are there over all replicas."""
        for parameter, gradient in self.gradients.items():
            if parameter.grad is None:
                gradient.zero_()
            elif parameter.grad.data_ptr() != gradient.data_ptr():
                gradient.copy_(parameter.grad)
        self._flags.fill_(1.0)
        for number, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                self._flags[number].zero_()
        memory = self.memory
        return replicas.all_reduce(torch.view_as_real(memory).view(-1) if memory.is_complex() else memory)

    def hand_out(self) -> None:
        """Give the parameters the sums.

        The host waits for the device only where a parameter has no gradient here, and may have one elsewhere.
        """
        everywhere = all(parameter.grad is not None for parameter in self.parameters)
        anywhere = [True] * len(self.parameters) if everywhere else (self._flags != 0).tolist()
        for (parameter, gradient), has_one in zip(self.gradients.items(), anywhere, strict=True):
            parameter.grad = gradient if has_one else None


def buckets_of(parameters: Iterable[nn.Parameter], size: int = BUCKET_BYTES) -> list[Bucket]:
    """Buckets of parameters: as many of one dtype as fit, in their order, and at least one.

    Args:
        parameters: those without a gradient are left out.
        size: bytes that a bucket's gradients may have.
    """
    filling: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    full: list[list[nn.Parameter]] = []
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        key = parameter.dtype, parameter.device
        held = filling.setdefault(key, [])
        if held and sum(p.nbytes for p in held) + parameter.nbytes > size:
            full.append(held)
            held = filling[key] = []
        held.append(parameter)
    return [Bucket(held) for held in (*full, *filling.values())]


class Reduction:
    """The reduction of a stage's gradients, under way.

    Args:
        buckets: all of the stage.
        replicas: this device's end to its replicas.
    """

    def __init__(self, buckets: Sequence[Bucket], replicas: Backend) -> None:
        self._buckets = buckets
        self._handles = [bucket.reduce(replicas) for bucket in buckets]

    @property
    def bytes(self) -> int:
        """That are summed."""
        return sum(bucket.memory.nbytes for bucket in self._buckets)

    def watch(self) -> None:
        """Have `ended_ns` tell when it was over, where the transport's handles can."""
        for handle in self._handles:
            if hasattr(handle, "watch"):
                handle.watch()

    @property
    def ended_ns(self) -> int | None:
        """When the last sum was over, on the monotonic clock; None where nothing tells or nobody watched."""
        ends = [getattr(handle, "ended_ns", None) for handle in self._handles]
        told = [end for end in ends if end is not None]
        return max(told) if told and len(told) == len(ends) else None

    def wait(self) -> None:
        """Return when the parameters have the sums."""
        for handle in self._handles:
            handle.wait()
        for bucket in self._buckets:
            bucket.hand_out()
