"""Buckets of gradients of which each replica sums a part, and the slices of parameters in that part; see `shards`.

A bucket of frozen parameters has no gradients, and no slices that an optimizer steps.
"""

from collections.abc import Callable, Mapping

import torch
from attrs import define, frozen
from torch import Tensor, nn

from ....backends.contract import Backend, Handle
from ....core.errors import RequestError
from .slots import Slots


@frozen
class Sharing:
    """How a stage shares its optimizer over its replicas.

    Args:
        replicas: the transport of the stage's device to its replicas that is open now.
        replica, count: the number of this replica, and of all.
        tied: names of parameters that other stages read, too.
        gradients: whether each replica holds its part of the gradients alone, too.
        parameters: whether each replica holds its part of the parameters alone, too, outside of runs.
        order: names of the parameters in the order in which a backward computes their gradients; others follow.
        slots: memory of buckets of the stage's device; None for slots of the stage alone.
        split: names of parameters of which tensor ranks have parts. ``replicas`` are then those with the same parts,
            and gradients of other parameters are summed over all. None without tensor ranks.
    """

    replicas: Callable[[], Backend]
    replica: int
    count: int
    tied: frozenset[str] = frozenset()
    gradients: bool = False
    parameters: bool = False
    order: tuple[str, ...] = ()
    slots: Slots | None = None
    split: frozenset[str] | None = None

    def copies(self, name: str, replicas: int) -> int:
        """How many of some replicas, tensor ranks included, have the same part of a parameter."""
        return 1 if self.split is None or name in self.split else replicas // self.count


@define(eq=False)
class Part:
    """This replica's slice of a parameter.

    Args:
        name, whole: the parameter.
        start, stop: of its elements in the order of memory.
        value: the slice, which the optimizer steps: a view of the parameter, or of the bucket's values; a scalar stays
            one.
        gradient: the slice of the sum of the parameter's gradients, in the bucket's part.
    """

    name: str
    whole: nn.Parameter
    start: int
    stop: int
    value: nn.Parameter
    gradient: Tensor

    def follow(self) -> None:
        """Make the slice a view of the parameter again, if the parameter was given other memory."""
        now = _slice(self.whole, self.start, self.stop)
        if now.data_ptr() != self.value.data_ptr():
            self.value.data = now


class ShardedBucket:
    """Gradients of some parameters in one tensor, of which each replica sums a part.

    Args:
        parameters: by name, of one dtype and device.
        sharing: how they are shared.
        trained: whether they have gradients.

    Attributes:
        memory: the whole tensor; None if replicas share gradients: it then is in a slot while it is used.
        part: the sums of this replica's part; empty without gradients.
        values: the parameters of this replica's part, if replicas share parameters; else None.
        elements: of the whole tensor, equal parts for all replicas.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], sharing: Sharing, *, trained: bool = True) -> None:
        self.parameters, self._sharing = parameters, sharing
        self._count = sum(p.numel() for p in parameters.values())
        first = next(iter(parameters.values()))
        self.dtype, self.device = first.dtype, first.device
        self.length = -(-self._count // sharing.count)
        self.elements = self.length * sharing.count
        begin = sharing.replica * self.length
        self.memory: Tensor | None = None
        if sharing.gradients:
            self.part = torch.empty(self.length if trained else 0, dtype=self.dtype, device=self.device)
        else:
            self.memory = torch.empty(self.elements, dtype=self.dtype, device=self.device)
            self.clear_padding(self.memory)
            self.part = self.memory[self.own]
        self.values: Tensor | None = None
        if sharing.parameters:
            self.values = torch.zeros(self.length, dtype=self.dtype, device=self.device)
        self.offsets: dict[str, int] = {}
        self.parts: list[Part] = []
        self._places: dict[nn.Parameter, tuple[tuple[int, ...], int]] = {}
        offset = 0
        for name, parameter in parameters.items():
            size = parameter.numel()
            self.offsets[name] = offset
            self._places[parameter] = _strides(name, parameter), offset
            start, stop = max(begin - offset, 0), min(begin + self.length - offset, size)
            if start < stop and trained:
                at = offset + start - begin
                if self.values is None:
                    value = nn.Parameter(_slice(parameter, start, stop))
                else:  # the parameter may have no memory yet
                    own = self.values[at : at + stop - start]
                    value = nn.Parameter(own.view(()) if parameter.ndim == 0 else own)
                gradient = self.part[at : at + stop - start].view(value.shape)
                self.parts.append(Part(name, parameter, start, stop, value, gradient))
            offset += size

    @property
    def own(self) -> slice:
        """The elements of this replica's part."""
        begin = self._sharing.replica * self.length
        return slice(begin, begin + self.length)

    @property
    def is_single(self) -> bool:
        """Whether it is of one parameter."""
        return len(self.parameters) == 1

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.elements * self.dtype.itemsize

    @property
    def gradients(self) -> dict[nn.Parameter, Tensor]:
        """Each parameter's gradient in the whole tensor, which this replica holds."""
        assert self.memory is not None
        return {parameter: self.gradient_in(self.memory, parameter) for parameter in self._places}

    def memory_in(self, slot: Tensor) -> Tensor:
        """The whole tensor in a slot."""
        return slot[: self.nbytes].view(self.dtype)

    def gradient_in(self, memory: Tensor, parameter: nn.Parameter) -> Tensor:
        """A parameter's gradient in the whole tensor, with the strides of the parameter."""
        strides, offset = self._places[parameter]
        return memory.as_strided(parameter.shape, strides, memory.storage_offset() + offset)

    def clear_padding(self, memory: Tensor) -> None:
        """Write zeros to the end of the whole tensor, which no parameter uses."""
        memory[self._count :] = 0

    def reduce(self, replicas: Backend, memory: Tensor) -> Handle:
        """Start to sum this replica's part of the whole tensor over all.

        Args:
            replicas: the transport to all; with tensor ranks to those with other parts, too.
            memory: the whole tensor.
        """
        split = self._sharing.split
        if split is None:
            return replicas.reduce_scatter(numbers_of(memory))
        if not split.isdisjoint(self.parameters):
            return self._sharing.replicas().reduce_scatter(numbers_of(memory))
        return replicas.all_reduce(numbers_of(memory))

    def gather(self, replicas: Backend, memory: Tensor) -> Handle:
        """Start to gather the parameters in the whole tensor; `assign` copies them."""
        with torch.no_grad():
            for part in self.parts:
                at = self.offsets[part.name] + part.start
                memory[at : at + part.value.numel()].view(part.value.shape).copy_(part.value)
        return replicas.all_gather(numbers_of(memory))

    def assign(self, memory: Tensor) -> None:
        """Copy the gathered parameters to the model's."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                at = self.offsets[name]
                in_memory_order(parameter).copy_(memory[at : at + parameter.numel()])


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


def numbers_of(memory: Tensor) -> Tensor:
    """A tensor's real numbers, whose sums are those of complex ones."""
    return torch.view_as_real(memory).view(-1) if memory.is_complex() else memory
