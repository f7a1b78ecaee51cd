"""Streams that record: operators run at once on the CPU, and the order that the streams guarantee is checked.

Every stream has a vector clock. An operator on a stream is ordered after what that stream's clock covers, and after
nothing else: that the host called it later, or that the CPU ran it later, does not count. The checks are:

1. a read is ordered after the write of its tensor;
2. a write is ordered after the earlier reads and the earlier write;
3. memory that the host frees is reused at once on the stream that allocated it, as by CUDA's allocator: the next tensor
   allocated there must be ordered after every use of the freed one, on any stream.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define, field
from panpipe.backends.streams import Streams
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Clock = dict[int, int]
Access = tuple[int, int]
"""A stream, and its number of operators at the access."""


@define(eq=False)
class Stream:
    number: int
    name: Any
    clock: Clock = field(factory=dict)


@define(eq=False)
class _Memory:
    made_on: int | None
    write: Access | None = None
    reads: dict[int, int] = field(factory=dict)

    def uses(self) -> list[Access]:
        return [*self.reads.items(), *([self.write] if self.write is not None else [])]


class RecordedStreams(Streams):
    """Streams of the CPU that record.

    Args:
        ignored: name of the stream whose waits are ignored, to see that this is found.

    Attributes:
        problems: what is not ordered.
        operators: stream name → operators that ran there.
        host_waits: methods by which the host waited for the device, in order.
    """

    def __init__(self, ignored: str = "") -> None:
        super().__init__()
        self.problems: list[str] = []
        self.operators: dict[Any, int] = {}
        self.host_waits: list[str] = []
        self._ignored = ignored
        self._lock = threading.RLock()
        self._streams: list[Stream] = []
        self._memory: dict[int, _Memory] = {}
        self._freed: dict[int, list[_Memory]] = {}
        self._divided: dict[range, dict[tuple[int, int], _Memory]] = {}
        self._thread = threading.local()
        self._default = self._made("default")

    def _made(self, name: Any) -> Stream:
        with self._lock:
            self._streams.append(Stream(len(self._streams), name))
            return self._streams[-1]

    def named(self, name: Any, device: torch.device, *, urgent: bool = False) -> Stream:
        stream = super().named(name, device, urgent=urgent)
        stream.name = name
        return stream

    def new(self, device: torch.device, urgent: bool) -> Stream:
        return self._made(None)

    def current(self, device: torch.device) -> Stream:
        return getattr(self._thread, "stream", self._default)

    @contextmanager
    def using(self, *streams: Stream) -> Iterator[None]:
        before = getattr(self._thread, "stream", None)
        self._thread.stream = streams[-1]
        try:
            if before is None:
                with _Recording(self):
                    yield
            else:
                yield
        finally:
            if before is None:
                del self._thread.stream
            else:
                self._thread.stream = before

    def record(self, stream: Stream, *, timed: bool = False) -> tuple[Clock, int]:
        with self._lock:
            return dict(stream.clock), sum(stream.clock.values())

    def wait(self, stream: Stream, event: tuple[Clock, int]) -> None:
        if stream.name is not None and stream.name[0] == self._ignored:
            return
        with self._lock:
            for number, count in event[0].items():
                stream.clock[number] = max(stream.clock.get(number, 0), count)

    def upload(self, tensor: Tensor, device: torch.device) -> Tensor:
        return tensor.clone()

    def download(self, tensor: Tensor) -> Callable[[], Tensor]:
        held = tensor.clone()

        def wait() -> Tensor:
            self.host_waits.append("download")
            return held

        return wait

    def finish(self, stream: Stream) -> None:
        self.host_waits.append("finish")
        self.wait(self.current(torch.device("cpu")), self.record(stream))

    def synchronize(self, device: torch.device) -> None:
        self.host_waits.append("synchronize")
        with self._lock:
            for stream in self._streams:
                for other in self._streams:
                    self.wait(stream, (dict(other.clock), 0))

    def elapsed_s(self, start: tuple[Clock, int], end: tuple[Clock, int]) -> float:
        self.host_waits.append("elapsed_s")
        return (end[1] - start[1]) * 1e-6

    # What an operator does

    def ran(self, func: Any, read: list[Tensor], written: list[Tensor], made: list[Tensor]) -> None:
        with self._lock:
            stream = self.current(torch.device("cpu"))
            self.operators[stream.name] = self.operators.get(stream.name, 0) + 1
            stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
            now = stream.number, stream.clock[stream.number]
            for tensor in read:
                memory, *others = self._parts(tensor)
                for part in (memory, *others):
                    self._check_after(func, stream, "reads what is being written", part.write)
                memory.reads[now[0]] = now[1]
            for tensor in written:
                memory, *others = self._parts(tensor)
                for use in (use for part in (memory, *others) for use in part.uses()):
                    self._check_after(func, stream, "writes what is in use", use)
                memory.write, memory.reads = now, {}
            for tensor in made:
                if tensor.untyped_storage()._cdata not in self._memory:
                    for memory in self._freed.pop(stream.number, []):
                        for use in memory.uses():
                            self._check_after(func, stream, "is handed memory that is in use", use)
                    self._of(tensor, stream.number).write = now

    def _check_after(self, func: Any, stream: Stream, what: str, use: Access | None) -> None:
        if use is not None and stream.clock.get(use[0], 0) < use[1]:
            self.problems.append(f"{func} on {stream.name} {what} on {self._streams[use[0]].name}")

    def divide(self, tensor: Tensor) -> None:
        """From now on the tensor's memory is checked by ranges of bytes: several slots of it may be in use at once."""
        self._divided[range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)] = {}

    def _parts(self, tensor: Tensor) -> list[_Memory]:
        """The memory of a tensor, and what else of divided memory overlaps with it."""
        if not self._divided or isinstance(tensor, FakeTensor):  # which has no address
            return [self._of(tensor)]
        start = tensor.data_ptr()
        slots = next((slots for addresses, slots in self._divided.items() if start in addresses), None)
        if slots is None:
            return [self._of(tensor)]
        here = start, start + tensor.nbytes
        own = slots.setdefault(here, _Memory(None))
        return [own, *(slot for (a, b), slot in slots.items() if slot is not own and a < here[1] and here[0] < b)]

    def _of(self, tensor: Tensor, made_on: int | None = None) -> _Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memory:
            self._memory[key] = _Memory(made_on)
            weakref.finalize(storage, self._died, key)
        return self._memory[key]

    def _died(self, key: int) -> None:
        with self._lock:
            memory = self._memory.pop(key)
            if memory.made_on is not None:
                self._freed.setdefault(memory.made_on, []).append(memory)


class _Recording(TorchDispatchMode):
    def __init__(self, streams: RecordedStreams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        read, written = [], []
        for position, argument in enumerate(func._schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
            writes = argument.alias_info is not None and argument.alias_info.is_write
            (written if writes else read).extend(tensors)
        if torch.Tag.inplace_view not in func.tags and not func.is_view:
            made = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
            self._streams.ran(func, read, written, made)
        return result
