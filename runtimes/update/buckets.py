"""Buckets: the gradients of some parameters in one tensor, which replicas sum as DistributedDataParallel does.

Gradients are allocated in buckets, so that nothing is copied. What replicas share (``core/policies/sharding``) decides
what a sum is, and which memory a bucket has::

    none        │ gradient │ gradient │ … │ has one? │    all-reduce: every replica has the sums
    optimizer   │ gradient │ gradient │     gradient     │  │
                │    replica 0    │    replica 1    │ …      reduce-scatter: equal parts, wherever they cut a gradient
    gradients   in a slot while the gradients of a microbatch are computed and summed (`shards`)
    parameters  also the parameters are gathered in it (`shared_parameters`)

REDUCE_GRAD starts the sums of a stage, and the device continues to compute; STEP waits for those of its stage,
REDUCE_TIED and SYNC for those of all stages. A parameter without a gradient in any replica keeps ``grad`` None, as in
one process: a region (Python code) may take another branch in one replica, so flags record which have one.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from attrs import define, frozen
from torch import Tensor, nn

from ...backends.contract import Backend, Handle
from ...core.capture.programs.accumulated_products import accumulate_product, first_product
from ...core.capture.regions.regions import is_no_gradient
from ...core.errors import RequestError
from ...core.policies.sharding import SLOTS

BUCKET_BYTES = 25 << 20
"""The default of DistributedDataParallel: of 0 to 50 MB, the authors find 10 to 25 MB fastest (Li et al., "PyTorch
Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 5.2). A plan reduces a whole stage
after its last backward, so a bucket's size only limits how much is in flight at a time."""


class GradientSink:
    """Where a backward program puts the gradients of parameters: in ``grad``, or in the slots of `shards`.

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


class Transfers:
    """Reductions or all-gathers of buckets, in flight.

    Args:
        starts: each starts one.
        size: bytes of the buckets.
        end: what follows all of them, once.
        most: transfers in flight at a time, and `wait` starts the others; None starts all at once.
    """

    def __init__(
        self,
        starts: Iterable[Callable[[], Handle]],
        size: int = 0,
        end: Callable[[], None] = lambda: None,
        most: int | None = None,
    ) -> None:
        self._left, self._most, self._end, self.bytes = deque(starts), most, end, size
        self._in_flight, self._watched = deque[Handle](), list[Handle]()
        self._start()

    def _start(self) -> None:
        while self._left and (self._most is None or len(self._in_flight) < self._most):
            self._in_flight.append(self._left.popleft()())

    def watch(self) -> None:
        """Record the end in `ended_ns`, if the transport's handles support it, and if all transfers are under way: of
        others the waiting thread adds the parts."""
        self._watched = [handle for handle in self._in_flight if self._most is None]
        for handle in self._watched:
            if hasattr(handle, "watch"):
                handle.watch()

    @property
    def ended_ns(self) -> int | None:
        """The end of the last transfer on the monotonic clock; None without `watch` or the transport's support."""
        ends: list[int | None] = [getattr(handle, "ended_ns", None) for handle in self._watched]
        known = [end for end in ends if end is not None]
        return max(known) if known and len(known) == len(ends) else None

    def wait(self) -> None:
        """Return when all have ended and their values are in use; further calls have no effect."""
        while self._in_flight:
            self._in_flight.popleft().wait()
            self._start()
        end, self._end = self._end, lambda: None
        end()


class Slots:
    """Memory that the buckets of a device's stages use in turns: slots of equal size, allocated when they are needed
    and then kept, `SLOTS` or more if all are in use. They have no memory until `grow` is called.

    Attributes:
        all: the slots that exist, as bytes.
    """

    def __init__(self) -> None:
        self._device, self._size = torch.device("cpu"), 0
        self.all: list[Tensor] = []
        self._in_flight: deque[Transfers] = deque()
        self._free: list[Tensor] = []

    def take(self) -> Tensor:
        """A free slot. If all are in use, it waits for the earliest transfers, in the same order in all replicas; if
        none is in flight, another slot is allocated."""
        while not self._free and len(self.all) >= SLOTS and self._in_flight:
            self._in_flight[0].wait()
        if self._free:
            return self._free.pop()
        slot = torch.empty(self._size, dtype=torch.uint8, device=self._device)
        self.all.append(slot)
        return slot

    def transfer(self, slot: Tensor, start: Callable[[], Handle], end: Callable[[], None]) -> Transfers:
        """Start a transfer from or to a slot, which is free after it and after ``end``."""

        def ended() -> None:
            self._in_flight.remove(started)
            end()
            self._free.append(slot)

        started = Transfers([start], end=ended)
        self._in_flight.append(started)
        return started

    def forget_used(self) -> None:
        """Forget all slots if some are in use after a step that failed: its transfers may still write to them."""
        if len(self._free) < len(self.all):
            self.all, self._free = [], []
            self._in_flight.clear()

    def grow(self, bucket: "Bucket") -> None:
        """Make the slots large enough for a bucket, on its device; no slot may be in use."""
        if bucket.nbytes > self._size:
            self._size, self._device = bucket.nbytes, bucket.device
            self.all, self._free = [], []


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


@define(eq=False)
class Part:
    """This replica's slice of a parameter.

    Args:
        start, stop: of the elements of the ``whole`` in the order of memory.
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

    def slice_of(self, elements: Tensor) -> Tensor:
        """The slice of a tensor of as many elements as the whole, in one dimension."""
        return elements[self.start : self.stop]

    def follow(self) -> None:
        """Make the slice a view of the parameter again, if the parameter was given other memory."""
        now = _slice(self.whole, self.start, self.stop)
        if now.data_ptr() != self.value.data_ptr():
            self.value.data = now


class Bucket:
    """The gradients of some parameters in one tensor.

    Args:
        parameters: of one dtype and device.

    Attributes:
        memory: the whole tensor; None if replicas share gradients: it then is in a slot while it is used.
        gradients: each parameter's gradient in ``memory``; empty without it.
        values: the parameters of this replica's part, if replicas share parameters; else None.
        elements: of the whole tensor, in equal parts for all replicas.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], sharing: Sharing | None = None, *, trained: bool = True
    ) -> None:
        self.parameters, self._sharing = parameters, sharing
        self._count = sum(p.numel() for p in parameters.values())
        first = next(iter(parameters.values()))
        self.dtype, self.device = first.dtype, first.device
        replica, count = (0, 1) if sharing is None else (sharing.replica, sharing.count)
        length = self._count + len(parameters) if sharing is None else -(-self._count // count)
        begin, self.elements = replica * length, length * count
        self.own = slice(begin, begin + length)
        self.memory = None if sharing is not None and sharing.gradients else self.empty(self.elements)
        if self.memory is None:
            self.part = self.empty(length if trained else 0)
        else:
            self.clear_padding(self.memory)
            self.part = self.memory[self.own]
        self.values = self.empty(length).zero_() if sharing is not None and sharing.parameters else None
        self.parts: list[Part] = []
        self._offsets: dict[nn.Parameter, int] = {}
        offset = 0
        for name, parameter in parameters.items():
            self._offsets[parameter], size = offset, parameter.numel()
            with torch._C.DisableTorchFunctionSubclass():  # one without memory now refuses other uses
                dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
            if sharing is not None and not dense:
                raise RequestError(
                    f"parameter '{name}' has strides {tuple(parameter.stride())} for shape {tuple(parameter.shape)}: "
                    "replicas share dense parameters; make it contiguous, or leave shard out"
                )
            start, stop = max(begin - offset, 0), min(begin + length - offset, size)
            if sharing is not None and trained and start < stop:
                self.parts.append(self._part(name, parameter, start, stop, offset - begin))
            offset += size
        memory = self.memory
        self.gradients = {} if memory is None else {p: self.gradient_in(memory, p) for p in self._offsets}

    def _part(self, name: str, parameter: nn.Parameter, start: int, stop: int, at: int) -> Part:
        own = slice(at + start, at + stop)
        # With values of its own the parameter may have no memory yet.
        value = _slice(parameter, start, stop) if self.values is None else self.values[own]
        held = nn.Parameter(value.view(()) if parameter.ndim == 0 else value)
        return Part(name, parameter, start, stop, held, self.part[own].view(held.shape))

    def empty(self, elements: int | None = None) -> Tensor:
        """Memory with undefined values; by default for the whole tensor."""
        return torch.empty(self.elements if elements is None else elements, dtype=self.dtype, device=self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.elements * self.dtype.itemsize

    def memory_in(self, slot: Tensor) -> Tensor:
        """The whole tensor in a slot."""
        return slot[: self.nbytes].view(self.dtype)

    def elements_of(self, parameter: nn.Parameter, memory: Tensor) -> Tensor:
        """The elements of the whole tensor that belong to a parameter, in one dimension."""
        offset = self._offsets[parameter]
        return memory[offset : offset + parameter.numel()]

    def gradient_in(self, memory: Tensor, parameter: nn.Parameter) -> Tensor:
        """A parameter's gradient in the whole tensor; with the parameter's strides if replicas have parts of it."""
        elements = self.elements_of(parameter, memory)
        if self._sharing is None:
            return elements.view(parameter.shape)
        return elements.as_strided(parameter.shape, parameter.stride())

    def clear_padding(self, memory: Tensor) -> None:
        """Write zeros to the end of the whole tensor, which no parameter uses."""
        memory[self._count :] = 0

    def reduce_collected(self, replicas: Backend) -> Handle:
        """Start to sum the gradients of the parameters, in the bucket's own memory; a missing one counts as zeros.

        They are copied to their places where they are not there already.
        """
        assert self.memory is not None
        for parameter, gradient in self.gradients.items():
            if parameter.grad is None:
                gradient.zero_()
            elif parameter.grad.data_ptr() != gradient.data_ptr():
                gradient.copy_(parameter.grad)
        if self._sharing is None:
            flags = self.memory[self._count :].fill_(1.0)
            for number, parameter in enumerate(self.gradients):
                if parameter.grad is None:
                    flags[number].zero_()
        return self.reduce(replicas, self.memory)

    def reduce(self, replicas: Backend, memory: Tensor) -> Handle:
        """Start to sum the whole tensor, or this replica's part of it, over all replicas; with tensor ranks also over
        those with other parts."""
        sharing, numbers = self._sharing, numbers_of(memory)
        if sharing is not None and (sharing.split is None or not sharing.split.isdisjoint(self.parameters)):
            return (replicas if sharing.split is None else sharing.replicas()).reduce_scatter(numbers)
        return replicas.all_reduce(numbers)

    def assign_gradients(self) -> None:
        """Set the gradients of parameters that are not shared to the sums.

        The host waits for the device only if a parameter has no gradient here, and may have one in another replica.
        """
        assert self.memory is not None
        everywhere = all(parameter.grad is not None for parameter in self.gradients)
        anywhere = [True] * len(self.gradients) if everywhere else (self.memory[self._count :] != 0).tolist()
        for (parameter, gradient), has_one in zip(self.gradients.items(), anywhere, strict=True):
            parameter.grad = gradient if has_one else None

    def gather(self, replicas: Backend, memory: Tensor) -> Handle:
        """Start to gather the parameters in the whole tensor; `assign` copies them."""
        with torch.no_grad():
            if self.values is not None:
                memory[self.own].copy_(self.values)
            for part in self.parts if self.values is None else ():
                part.slice_of(self.elements_of(part.whole, memory)).copy_(part.value.view(-1))
        return replicas.all_gather(numbers_of(memory))

    def gathered(self, replicas: Backend) -> Tensor:
        """The parameters, whole, in a new tensor."""
        memory = self.empty()
        self.gather(replicas, memory).wait()
        return memory

    def assign(self, memory: Tensor) -> None:
        """Copy the gathered parameters to the model's."""
        with torch.no_grad():
            for parameter in self.parameters.values():
                in_memory_order(parameter).copy_(self.elements_of(parameter, memory))


def divided(named: Mapping[str, nn.Parameter], size: int = BUCKET_BYTES) -> list[dict[str, nn.Parameter]]:
    """Divide parameters into those of buckets of one dtype, in order; each has as many as fit, and at least one.

    Args:
        size: most bytes of a bucket.
    """
    filling: dict[tuple[torch.dtype, torch.device], dict[str, nn.Parameter]] = {}
    full: list[dict[str, nn.Parameter]] = []
    for name, parameter in named.items():
        key = parameter.dtype, parameter.device
        held = filling.setdefault(key, {})
        if held and sum(p.nbytes for p in held.values()) + parameter.nbytes > size:
            full.append(held)
            held = filling[key] = {}
        held[name] = parameter
    return [*full, *filling.values()]


def in_memory_order(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of memory, as a view of one dimension."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def numbers_of(memory: Tensor) -> Tensor:
    """A tensor's real numbers, whose sums are those of complex ones."""
    return torch.view_as_real(memory).view(-1) if memory.is_complex() else memory


def _slice(parameter: nn.Parameter, start: int, stop: int) -> Tensor:
    elements = in_memory_order(parameter)[start:stop]
    return elements.view(()) if parameter.ndim == 0 else elements
