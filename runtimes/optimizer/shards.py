"""A stage's optimizer, of which each replica holds a part (ZeRO-1): a slice of every bucket of gradients.

    bucket       │ gradient │ gradient │     gradient     │  │    n equal parts, wherever they cut a gradient
                 │    replica 0    │    replica 1    │ …
    REDUCE_GRAD  a reduce-scatter of every bucket: each replica has the sums of its part
    STEP         the optimizer steps slices of the parameters, which are views of the model's own
    UNSHARD      an all-gather of the parameters through the memory of the buckets, where gradients are no longer needed

Slices are of a parameter's elements in the order of memory, in one dimension, so the optimizer's update of an element
must not depend on others (`elementwise` checks that). A tied weight has a bucket of its own: all stages that read it
then cut it at the same places.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import define, frozen
from torch import Tensor, nn
from torch.optim import Optimizer

from ...backends.contract import Backend, Handle
from ...core.errors import RequestError
from .buckets import BUCKET_BYTES, divided, fill_with_gradients

IN_FLIGHT = 2
"""Buckets that are reduced at a time: a transport without its own reduce-scatter receives into further memory."""


@frozen
class Sharing:
    """How a stage shares its optimizer over its replicas.

    Args:
        replicas: the transport of the stage's device to its replicas that is open now.
        replica, count: the number of this replica, and of all.
        tied: names of parameters that other stages read, too.
    """

    replicas: Callable[[], Backend]
    replica: int
    count: int
    tied: frozenset[str] = frozenset()


@define(eq=False)
class Part:
    """This replica's slice of a parameter.

    Args:
        name, whole: the parameter.
        start, stop: of its elements in the order of memory.
        value: the slice, which the optimizer steps: a view of the parameter; a scalar stays one.
        gradient: the slice of the parameter's gradient in the bucket.
    """

    name: str
    whole: nn.Parameter
    start: int
    stop: int
    value: nn.Parameter
    gradient: Tensor

    def follow(self) -> None:
        """View the parameter's present memory, if it was given other memory."""
        now = _slice(self.whole, self.start, self.stop)
        if now.data_ptr() != self.value.data_ptr():
            self.value.data = now


class ShardedBucket:
    """Gradients of some parameters in one tensor, of which each replica sums a part.

    Args:
        parameters: by name, of one dtype and device.
        sharing: how they are shared.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], sharing: Sharing) -> None:
        self.parameters, self._sharing = parameters, sharing
        count = sum(p.numel() for p in parameters.values())
        first = next(iter(parameters.values()))
        self.length = -(-count // sharing.count)
        self.memory = torch.empty(self.length * sharing.count, dtype=first.dtype, device=first.device)
        self.memory[count:] = 0
        begin = sharing.replica * self.length
        self.gradients: dict[nn.Parameter, Tensor] = {}
        self.offsets: dict[str, int] = {}
        self.parts: list[Part] = []
        offset = 0
        for name, parameter in parameters.items():
            size = parameter.numel()
            self.offsets[name] = offset
            self.gradients[parameter] = self.memory.as_strided(parameter.shape, _strides(name, parameter), offset)
            start, stop = max(begin - offset, 0), min(begin + self.length - offset, size)
            if start < stop:
                value = nn.Parameter(_slice(parameter, start, stop))
                gradient = self.memory[offset + start : offset + stop].view(value.shape)
                self.parts.append(Part(name, parameter, start, stop, value, gradient))
            offset += size

    @property
    def own(self) -> slice:
        """The elements of this replica's part."""
        begin = self._sharing.replica * self.length
        return slice(begin, begin + self.length)

    def reduce(self, replicas: Backend) -> Handle:
        """Start to sum this replica's part over all; a missing gradient counts as zeros."""
        fill_with_gradients(self.gradients)
        return replicas.reduce_scatter(_numbers(self.memory))

    def gather(self, replicas: Backend) -> Handle:
        """Start to gather the parameters in the bucket's memory; `assign` copies them."""
        with torch.no_grad():
            for part in self.parts:
                part.gradient.copy_(part.value)
        return replicas.all_gather(_numbers(self.memory))

    def assign(self) -> None:
        """Copy the gathered parameters to the model's."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                at = self.offsets[name]
                in_memory_order(parameter).copy_(self.memory[at : at + parameter.numel()])


class Shards:
    """The parts of one stage's optimizer and gradients that this replica holds.

    Args:
        parameters: the stage's trained ones, by name.
        sharing: how they are shared.
        size: most bytes of a bucket.

    Attributes:
        buckets: all of the stage.
        members: names of the parameters of each group of the optimizer, also of those of which this replica has no
            slice.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], sharing: Sharing, size: int = BUCKET_BYTES) -> None:
        self.sharing = sharing
        self.names = {parameter: name for name, parameter in parameters.items()}
        tied = [name for name in parameters if name in sharing.tied]
        together = [p for name, p in parameters.items() if name not in sharing.tied]
        self.buckets = [
            ShardedBucket({self.names[p]: p for p in bucket}, sharing) for bucket in divided(together, size)
        ] + [ShardedBucket({name: parameters[name]}, sharing) for name in tied]
        self.parts = {part.name: part for bucket in self.buckets for part in bucket.parts}
        self.members: list[list[str]] = []

    def add(self, name: str, parameter: nn.Parameter) -> None:
        """Share another parameter, in a bucket of its own: the slices of the others stay where they are."""
        bucket = ShardedBucket({name: parameter}, self.sharing)
        self.names[parameter] = name
        self.buckets.append(bucket)
        self.parts |= {part.name: part for part in bucket.parts}

    @property
    def gradients(self) -> dict[nn.Parameter, Tensor]:
        """The tensors in which gradients are accumulated."""
        return {p: gradient for bucket in self.buckets for p, gradient in bucket.gradients.items()}

    @property
    def values(self) -> dict[str, nn.Parameter]:
        """The slices by the names of their parameters."""
        return {name: part.value for name, part in self.parts.items()}

    def take(self, optimizer: Optimizer) -> None:
        """Let an optimizer that was created with whole parameters step the slices of this replica."""
        self.members += [[] for _ in optimizer.param_groups[len(self.members) :]]
        for group, members in zip(optimizer.param_groups, self.members, strict=True):
            members += [self.names[p] for p in group["params"] if p in self.names]
        narrow(optimizer, {p: self.parts.get(name) for p, name in self.names.items()})

    def follow(self) -> None:
        """View the parameters' present memory."""
        for part in self.parts.values():
            part.follow()


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


class ShardedReduction:
    """The reduction of a stage's gradients to the parts of the replicas, in flight.

    A few buckets are under way at a time; `wait` starts the others. A flag for each parameter records whether any
    replica has a gradient, as in `buckets`.

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


def in_memory_order(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of memory, as a view of one dimension."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _slice(parameter: nn.Parameter, start: int, stop: int) -> Tensor:
    elements = in_memory_order(parameter)[start:stop]
    return elements.view(()) if parameter.ndim == 0 else elements


def _strides(name: str, parameter: nn.Parameter) -> tuple[int, ...]:
    """A parameter's strides.

    Raises:
        RequestError: some of its elements share memory, or there are gaps.
    """
    expected = 1
    for size, stride in sorted(zip(parameter.shape, parameter.stride(), strict=True), key=lambda pair: pair[1]):
        if size == 1 or not parameter.numel():
            continue
        if stride != expected:
            raise RequestError(
                f"parameter '{name}' has strides {tuple(parameter.stride())} for shape {tuple(parameter.shape)}: "
                "replicas share dense parameters; make it contiguous, or leave shard out"
            )
        expected *= size
    return tuple(parameter.stride())


def _numbers(memory: Tensor) -> Tensor:
    """A tensor's real numbers, whose sums are those of complex ones."""
    return torch.view_as_real(memory).view(-1) if memory.is_complex() else memory
