"""Teams: the devices of a mesh, and functions that run on all of them together.

Planning, profiling and training are written once for both process models: threads of one process, and ranks under
``torchrun``. A *device* is a position in the pipeline, the same in every replica; the devices of all replicas are
numbered replica by replica::

    mesh dp=2,pp=2      replica 0: device 0 ── device 1       one transport along each pipeline,
                                      ╎           ╎
                        replica 1: device 0 ── device 1       and one over the replicas of each device
"""

import atexit
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ...backends import gloo, memcpy
from ...backends.contract import Backend, Handle
from ...backends.kind import BackendKind
from ...backends.streams import InheritedStreams
from ...core.cluster.mesh import Mesh
from ...core.errors import RequestError, WorkerError, message_of
from .arrival import ARRIVAL_S, join
from .failure import decoded, encoded, shortened, stopped
from .groups import device_mesh
from .watch import FailureWatch, failure_at_exit

T = TypeVar("T")


class Team(ABC):
    """The devices of a mesh.

    Attributes:
        mesh: pipeline × data.
        kind: the transport between them.
        local: the devices of this process.
        replica: their replica.
        where: device of this process → its torch device; empty until it is known.
    """

    mesh: Mesh
    kind: BackendKind
    local: tuple[int, ...]
    replica: int = 0
    where: Mapping[int, torch.device] = MappingProxyType({})

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
        """Number of pipelines, each with its own microbatches."""
        return self.mesh.data

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

    def agree(self, failure: Exception | None) -> None:
        """Raise a failure of any process on all of them, this process's own first; all call this together."""
        if failure is not None:
            raise failure

    def fail(self, failure: BaseException) -> None:  # noqa: B027 - one process has no others
        """Report to all other processes that this one stops, and why, so that none waits for it."""

    @abstractmethod
    def backend(self, device: int) -> Backend:
        """The transport of a device of this process along its pipeline."""

    @abstractmethod
    def replicas_of(self, device: int) -> Backend | None:
        """The transport of a device of this process to the same device of all replicas; None for one replica."""

    def total(self, device: int, numbers: Tensor) -> Tensor:
        """Sum a few numbers over all devices of all replicas; the result has the same bits on all of them.

        All devices call it together, from within ``run_local``, and wait for each other. It sums along each pipeline
        first, then over replicas. For sums over the stages alone there is ``backend(device).all_reduce``.

        Args:
            device: the calling device.
            numbers: its numbers; not changed.
        """
        sums = numbers.clone(memory_format=torch.contiguous_format)
        for end in (self.backend(device), self.replicas_of(device)):
            if end is not None and end.devices > 1:
                end.all_reduce(sums).wait()
        return sums

    def sum_over_processes(self, numbers: Tensor) -> Handle:
        """Start to sum a CPU tensor over the processes of this replica, in place; returns without waiting.

        Its messages are independent of those of the transport. One process has nothing to add.
        """
        return _Done()

    def rank(self, number: int) -> int:
        """The rank of a device, by its number among all devices of all replicas."""
        return self.mesh.cluster_devices[number]

    @abstractmethod
    def close(self) -> None:
        """Close threads and connections."""


class _Done:
    """The handle of an operation that has ended."""

    def wait(self) -> None:
        """See :class:`Handle`."""


class ThreadTeam(Team):
    """Devices that are threads of this process.

    Each device keeps its thread: PyTorch's thread-local state, such as cuDNN's convolution plans or the handle of a
    stream's cuBLAS workspace, is then created once and not in every step. A thread uses its caller's current streams.

    Args:
        size: how many devices.
        kind: the transport between them; one that connects threads.
    """

    def __init__(self, size: int, kind: BackendKind = memcpy.KIND) -> None:
        self.mesh, self.kind = Mesh(size), kind
        self.local = tuple(range(size))
        self._ends: Sequence[Backend] = ()
        self._threads: Sequence[ThreadPoolExecutor] = ()

    @property
    def threads(self) -> int:
        return 1

    def run_local(self, work: Callable[[int], T]) -> dict[int, T]:
        if self.kind.threads is None:
            raise RequestError(f"backend '{self.kind.name}' connects no threads: give ranks, or another backend")
        ends = self._ends = self.kind.threads(self.size)
        results: dict[int, T] = {}
        failures: dict[int, BaseException] = {}
        streams = InheritedStreams(set(self.where.values()))

        def body(device: int) -> None:
            torch.set_num_threads(self.threads)
            try:
                with streams.active(self.where.get(device)):
                    results[device] = work(device)
            except BaseException as failure:
                failures[device] = failure  # the first entry is the first failure: it wakes the others
                ends[device].close(failure)

        self._threads = self._threads or [ThreadPoolExecutor(1, f"panpipe device {d}") for d in self.local]
        for running in [thread.submit(body, d) for d, thread in zip(self.local, self._threads, strict=True)]:
            running.result()
        for end in ends:
            end.close()
        if failures:
            device, failure = next(iter(failures.items()))
            reason = f"{type(failure).__name__}: {message_of(failure)}"
            raise WorkerError(f"device {device} stopped: {reason}") from failure
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

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown(wait=False)
        self._threads = ()


class RankTeam(Team):
    """Devices that are ranks of the default process group, one each.

    If there is no such group yet, it is created from the environment that ``torchrun`` sets.

    Args:
        kind: the transport between them; one that connects ranks.
        arrival_s: seconds that ranks wait for each other; None for `ARRIVAL_S`.
        mesh: over all ranks, or a ``DeviceMesh`` of them, whose groups are used; by default one pipeline.

    Raises:
        WorkerError: a rank did not arrive in time.
        RequestError: the mesh is for another number of ranks, or differs between ranks.
    """

    def __init__(
        self, kind: BackendKind = gloo.KIND, arrival_s: float | None = None, mesh: Mesh | DeviceMesh | None = None
    ) -> None:
        if kind.ranks is None:
            raise RequestError(f"backend '{kind.name}' connects no ranks: give threads, or another backend")
        self._own_group = not dist.is_initialized()
        self._arrival_s = ARRIVAL_S if arrival_s is None else arrival_s
        join(self._arrival_s)
        self.kind = kind
        self._rank = dist.get_rank()
        self.mesh, groups = device_mesh(mesh)
        self.replica, position = self.mesh.place(self._rank)
        self.local = (position,)
        self._watch = FailureWatch(self._rank, self.mesh.ranks)
        if self.mesh.ranks > 1:
            self._watch.connect()
        self._pipeline = groups.get_group("pp")
        self._backend = kind.ranks(self._pipeline)
        self._replicas = kind.ranks(groups.get_group("dp")) if self.replicas > 1 else None
        self._closed = False
        atexit.register(self._close_at_exit)  # runs before the threads' functions: the last one registered runs first

    @property
    def rank_here(self) -> int:
        return self._rank

    def fail(self, failure: BaseException) -> None:
        if not self._watch.reported:
            self._watch.report(failure)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """A context that reports a failure to the other ranks, and raises the reason of the rank that failed first."""
        try:
            yield
        except BaseException as failure:
            reason = self._watch.report(failure)
            own = shortened(message_of(failure)), stopped(self._rank, failure)
            if isinstance(failure, WorkerError | RuntimeError) and reason not in own:
                raise WorkerError(reason) from failure
            raise

    def run_local(self, work: Callable[[int], T]) -> dict[int, T]:
        device = self.local[0]
        with self._watched():
            return {device: work(device)}

    def everywhere(self, work: Callable[[int], T]) -> list[T]:
        by_rank: list[Any] = [None] * self.mesh.ranks
        with self._watched():
            mine = work(self.local[0])
            with self._watch.awaiting("all", range(self.mesh.ranks), self._arrival_s):
                dist.all_gather_object(by_rank, mine)
        return [by_rank[rank] for rank in self.mesh.cluster_devices]

    def in_replica(self, work: Callable[[int], T]) -> list[T]:
        results: list[Any] = [None] * self.size
        ranks = self.mesh.replicas[self.replica]
        with self._watched():
            mine = work(self.local[0])
            with self._watch.awaiting(f"replica {self.replica}", ranks, self._arrival_s):
                dist.all_gather_object(results, mine, group=self._pipeline)
        return results

    def decide(self, choose: Callable[[], T]) -> T:
        # A failure is raised on all ranks: it is broadcast with the decision.
        chosen: list[Any] = [None, None]
        own: Exception | None = None
        if self.first:
            try:
                chosen[0] = choose()
            except Exception as failure:
                own, chosen[1] = failure, encoded(failure, self._rank)
        with self._watched():
            dist.broadcast_object_list(chosen, src=self.mesh.cluster_devices[0])
        if chosen[1] is not None:
            raise own or decoded(chosen[1])
        decision: T = chosen[0]
        return decision

    def sum_over_processes(self, numbers: Tensor) -> Handle:
        with self._watched():
            work: Handle = dist.all_reduce(numbers, group=self._pipeline, async_op=True)
        return work

    def collectively(self, work: Callable[[], T]) -> T:
        with self._watched():
            return work()

    def agree(self, failure: Exception | None) -> None:
        documents = self.everywhere(lambda _: None if failure is None else encoded(failure, self._rank))
        first = next((document for document in documents if document is not None), None)
        if first is not None:
            raise failure or decoded(first)

    def backend(self, device: int) -> Backend:
        return self._backend

    def replicas_of(self, device: int) -> Backend | None:
        return self._replicas

    def _close_at_exit(self) -> None:
        """Close a pipeline that the script left open; after a failure, the watch reports it and ends the process."""
        if failure_at_exit() is None:
            self.close()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._close_at_exit)
        self._watch.stop()
        self._backend.close()
        if self._replicas is not None:
            self._replicas.close()
        if self._own_group and dist.is_initialized():
            dist.destroy_process_group()
