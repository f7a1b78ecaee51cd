"""Teams: the devices of a mesh, and functions that run on all of them together.

Planning, profiling and training are written once for both process models: threads of one process, and ranks under
``torchrun``. A *device* is a position in the pipeline, the same in every replica; the devices of all replicas are
numbered replica by replica::

    mesh dp=2,pp=2      replica 0: device 0 ── device 1       one transport along each pipeline,
                                      ╎           ╎
                        replica 1: device 0 ── device 1       and one over the replicas of each device
"""

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from attrs import frozen
from torch import Tensor

from ...backends import memcpy
from ...backends.contract import ENDED, Backend, Handle, Pair
from ...backends.kind import BackendKind
from ...backends.streams import InheritedStreams
from ...core.cluster.mesh import Mesh
from ...core.errors import RequestError, WorkerError, described
from ..watch.activity import Activity, WatchedBackend
from ..watch.positions import ThreadHangs, timeout_of
from ..watch.process import WHERE
from .rank_tensors import WHOLE, RankTensors


@frozen
class Exchange:
    """Processes that send each other values.

    Args:
        number: of this process, in the order of the team's devices.
        gather: returns the values of all processes, in their order. All processes call it together.
    """

    number: int
    count: int
    gather: Callable[[Any], list[Any]]


ONE_PROCESS = Exchange(0, 1, lambda value: [value])
"""The exchange of a team whose devices are threads of one process."""


T = TypeVar("T")


class Team(ABC):
    """The devices of a mesh.

    Attributes:
        mesh: pipeline × data.
        kind: the transport between them.
        local: the devices of this process.
        replica: their replica.
        tensors: what a rank has of the model's tensors; ranks that share stages are replicas of one batch.
        where: device of this process → its torch device; empty until it is known.
        activities: device of this process → what it does.
    """

    mesh: Mesh
    kind: BackendKind
    local: tuple[int, ...]
    replica: int = 0
    tensors: RankTensors = WHOLE
    where: Mapping[int, torch.device] = MappingProxyType({})
    activities: Mapping[int, Activity] = MappingProxyType({})

    @property
    def rank_here(self) -> int:
        """The rank of this process; 0 if it is no rank."""
        return 0

    @property
    def threads(self) -> int:
        """Number of CPU threads of each device of this process."""
        return torch.get_num_threads()

    @property
    def size(self) -> int:
        """Devices along the pipeline."""
        return self.mesh.pipeline

    @property
    def replicas(self) -> int:
        """Number of pipelines, each with its own microbatches; with equal ones where ranks share stages."""
        return self.mesh.data

    @property
    def batch(self) -> int:
        """The number of this process's batch among those of a step: its replica, unless ranks share stages."""
        return self.replica // self.tensors.size

    @property
    def batches(self) -> int:
        """The number of batches of a step."""
        return self.replicas // self.tensors.size

    @property
    def batch_devices(self) -> range:
        """The numbers, among all devices, of those that compute parts of this process's batch."""
        each = self.size * self.tensors.size
        return range(self.batch * each, (self.batch + 1) * each)

    @property
    def first(self) -> bool:
        """Whether this process has the first device of the first replica: it decides and prints for all."""
        return self.replica == 0 and 0 in self.local

    @abstractmethod
    def everywhere(self, work: Callable[[int], T]) -> list[T]:
        """Run ``work(device)`` on all devices of all replicas at the same time; every process gets all the results,
        replica by replica."""

    @abstractmethod
    def in_replica(self, work: Callable[[int], T]) -> list[T]:
        """The same on the devices of this replica alone, independent of other replicas."""

    @abstractmethod
    def run_local(self, work: Callable[[int], T]) -> dict[int, T]:
        """Run ``work(device)`` on all devices at the same time; every process gets the results of its own devices."""

    @abstractmethod
    def decide(self, choose: Callable[[], T]) -> T:
        """Compute a value once, on the first device of the first replica, and broadcast it."""

    def collectively(self, work: Callable[[], T]) -> T:
        """Run a function that communicates by itself, once in each process, at the same time."""
        return work()

    @contextmanager
    def inside(self, method: str) -> Iterator[None]:
        """A context in which a method of the pipeline runs; reasons of hangs and ``SIGUSR1`` name it."""
        with ExitStack() as stack:
            for activity in self.activities.values():
                stack.enter_context(activity.inside(method))
            yield

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """A context in which this process waits for all others, for what does not use the team's own operations.

        Every wait between ranks is inside such a context, so that a rank that hangs ends with its reason.
        """
        return nullcontext()

    def agree(self, failure: Exception | None) -> None:
        """Raise a failure of any process on all of them, this process's own first; all call this together."""
        if failure is not None:
            raise failure

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """A context of which all processes raise a RequestError if any of them does; all enter it together."""
        failure: RequestError | None = None
        try:
            yield
        except RequestError as error:
            failure = error
        self.agree(failure)

    def fail(self, failure: BaseException) -> None:  # noqa: B027 - one process has no others
        """Report to all other processes that this one stops, and why, so that none waits for it."""

    def exchange(self) -> Exchange:
        """The processes of all replicas, which send each other values."""
        return ONE_PROCESS

    def background_exchange(self) -> Exchange:
        """The same for a thread that runs next to training; all processes call this together."""
        return ONE_PROCESS

    def connect(self, pairs: Iterable[Pair]) -> None:  # noqa: B027 - devices of one process are connected
        """Prepare for messages between pairs of devices of a pipeline; all processes of a replica call it together."""

    def clock_offset_ns(self) -> int:
        """Nanoseconds that this process's monotonic clock is ahead of the first one's; all call it together."""
        return 0

    @abstractmethod
    def backend(self, device: int) -> Backend:
        """The transport of a device of this process along its pipeline."""

    @abstractmethod
    def replicas_of(self, device: int) -> Backend | None:
        """The transport of a device of this process to the same device of all replicas; None for one replica."""

    def same_parts_of(self, device: int) -> Backend | None:
        """The transport of a device of this process to the replicas with the same parts of parameters; None for one,
        and where each has whole parameters."""
        return None

    def sum_over_processes(self, numbers: Tensor) -> Handle:
        """Start to sum a CPU tensor over the processes that share a batch, in place; returns without waiting.

        Its messages are independent of those of the transport. One process has nothing to add.
        """
        return ENDED

    def rank(self, number: int) -> int:
        """The rank of a device, by its number among all devices of all replicas."""
        return self.mesh.cluster_devices[number]

    @abstractmethod
    def close(self, failure: BaseException | None = None) -> None:
        """Close threads and connections.

        Args:
            failure: why the pipeline ends early; the other processes name it if they wait for this one.
        """


class ThreadTeam(Team):
    """Devices that are threads of this process.

    Each device keeps its thread: PyTorch's thread-local state, such as cuDNN's convolution plans or the handle of a
    stream's cuBLAS workspace, is then created once and not in every step. A thread uses its caller's current streams.

    Args:
        kind: the transport between them; one that connects threads.
        timeout_s: seconds without progress that devices wait for each other; None as in `timeout_of`.
    """

    def __init__(self, size: int, kind: BackendKind = memcpy.KIND, timeout_s: float | None = None) -> None:
        self.mesh, self.kind = Mesh(size), kind
        self.local = tuple(range(size))
        self.activities = {device: Activity() for device in self.local}
        self._hangs = ThreadHangs(self.activities, timeout_of(timeout_s))
        WHERE.add(self._hangs)
        WHERE.install()
        self._ends: Sequence[Backend] = ()
        self._threads: Sequence[DeviceThread] = ()

    @property
    def threads(self) -> int:
        return 1

    def run_local(self, work: Callable[[int], T]) -> dict[int, T]:
        if self.kind.threads is None:
            raise RequestError(f"backend '{self.kind.name}' connects no threads: give ranks, or another backend")
        if self._hangs.hang is not None:
            raise self._hangs.hang
        ends = self._ends = [
            WatchedBackend(end, self.activities[device], self.local)
            for device, end in enumerate(self.kind.threads(self.size))
        ]
        results: dict[int, T] = {}
        failures: dict[int, BaseException] = {}
        streams = InheritedStreams(set(self.where.values()))

        def body(device: int) -> None:
            torch.set_num_threads(self.threads)
            self.activities[device].thread = threading.get_ident()
            try:
                with streams.active(self.where.get(device)):
                    results[device] = work(device)
            except BaseException as failure:
                failures[device] = failure  # the first entry is the first failure: it wakes the others
                ends[device].close(failure)

        self._threads = self._threads or [DeviceThread(device) for device in self.local]
        running = {d: thread.submit(body) for d, thread in zip(self.local, self._threads, strict=True)}
        hang = self._hangs.wait(running)
        if hang is not None:
            for end in ends:
                end.close(hang)
            self._threads = ()
            raise hang
        for end in ends:
            end.close()
        if failures:
            device, failure = next(iter(failures.items()))
            if isinstance(failure, RequestError):
                raise failure
            raise WorkerError(f"device {device} stopped: {described(failure)}") from failure
        return {device: results[device] for device in self.local}

    def everywhere(self, work: Callable[[int], T]) -> list[T]:
        return list(self.run_local(work).values())

    def in_replica(self, work: Callable[[int], T]) -> list[T]:
        return self.everywhere(work)

    def decide(self, choose: Callable[[], T]) -> T:
        return choose()

    def backend(self, device: int) -> Backend:
        return self._ends[device]

    def replicas_of(self, device: int) -> Backend | None:
        return None

    def close(self, failure: BaseException | None = None) -> None:
        WHERE.remove(self._hangs)
        for thread in self._threads:
            thread.shutdown()
        self._threads = ()


_Call = tuple[Callable[[int], None], int, "Future[None]"]


class DeviceThread:
    """A thread that runs calls in order; it ends when this object is collected, or by `shutdown`.

    It is a daemon, unlike a thread of ``ThreadPoolExecutor``: one that hangs does not keep the process from ending.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        threading.Thread(target=_run, args=(self._calls,), name=f"panpipe device {device}", daemon=True).start()
        self._end = weakref.finalize(self, self._calls.put, None)

    def submit(self, work: Callable[[int], None]) -> "Future[None]":
        """Call a function with the device's number, which raises nothing."""
        done: Future[None] = Future()
        self._calls.put((work, self._device, done))
        return done

    def shutdown(self) -> None:
        """End the thread after the calls so far; returns without waiting."""
        self._end()


def _run(calls: "SimpleQueue[Any]") -> None:
    while (call := calls.get()) is not None:
        work, device, done = call
        work(device)
        done.set_result(None)
        del call, work, done  # what they refer to is not kept until the next call
