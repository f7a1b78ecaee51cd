"""Teams: the devices of a pipeline, and how something is done on all of them at once.

Planning, profiling and training are written once for both process models: threads of one process, and ranks under
``torchrun``.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..backends import gloo, memcpy
from ..backends.contract import Backend
from ..backends.kind import BackendKind
from ..core.errors import RequestError, WorkerError
from .arrival import ARRIVAL_S, join
from .watch import FailureWatch

T = TypeVar("T")


class Team(ABC):
    """The devices of a pipeline.

    Attributes:
        size: how many.
        local: the devices that live in this process.
        kind: the transport between them.
    """

    size: int
    kind: BackendKind
    local: tuple[int, ...]

    @abstractmethod
    def everywhere(self, work: Callable[[int], T]) -> list[T]:
        """Run ``work(device)`` on all devices at the same time; every process gets all the results."""

    @abstractmethod
    def run_local(self, work: Callable[[int], T]) -> dict[int, T]:
        """Run ``work(device)`` on all devices at the same time; every process gets the results of its own devices."""

    @abstractmethod
    def decide(self, choose: Callable[[], T]) -> T:
        """Compute something once, on the first device, and give it to all."""

    @abstractmethod
    def backend(self, device: int) -> Backend:
        """The transport's end at a device of this process."""

    @abstractmethod
    def close(self) -> None:
        """Let go of threads and connections."""


class ThreadTeam(Team):
    """Devices that are threads of this process.

    Args:
        size: how many devices.
        kind: the transport between them; one that connects threads.
    """

    def __init__(self, size: int, kind: BackendKind = memcpy.KIND) -> None:
        self.size, self.kind = size, kind
        self.local = tuple(range(size))
        self._ends: Sequence[Backend] = ()

    def run_local(self, work: Callable[[int], T]) -> dict[int, T]:
        if self.kind.threads is None:
            raise RequestError(f"backend '{self.kind.name}' connects no threads: give ranks, or another backend")
        ends = self._ends = self.kind.threads(self.size)
        results: dict[int, T] = {}
        failures: dict[int, BaseException] = {}

        def body(device: int) -> None:
            torch.set_num_threads(1)
            try:
                results[device] = work(device)
            except BaseException as failure:
                failures[device] = failure  # the first in here is the first of all: this one wakes the others
                ends[device].close(failure)

        threads = [threading.Thread(target=body, args=(d,), name=f"panpipe device {d}") for d in self.local]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for end in ends:
            end.close()
        if failures:
            device, failure = next(iter(failures.items()))
            raise WorkerError(f"device {device} stopped: {type(failure).__name__}: {failure}") from failure
        return {device: results[device] for device in self.local}

    def everywhere(self, work: Callable[[int], T]) -> list[T]:
        return list(self.run_local(work).values())

    def decide(self, choose: Callable[[], T]) -> T:
        return choose()

    def backend(self, device: int) -> Backend:
        return self._ends[device]

    def close(self) -> None:
        """Threads end with the work they were given."""


class RankTeam(Team):
    """Devices that are ranks of the default process group, one each.

    The group is made from the environment that ``torchrun`` sets where there is none yet.

    Args:
        kind: the transport between them; one that connects ranks.
        arrival_s: how long ranks wait for each other; None for `ARRIVAL_S`.

    Raises:
        WorkerError: a rank did not arrive in time.
    """

    def __init__(self, kind: BackendKind = gloo.KIND, arrival_s: float | None = None) -> None:
        if kind.ranks is None:
            raise RequestError(f"backend '{kind.name}' connects no ranks: give threads, or another backend")
        self._own_group = not dist.is_initialized()
        join(ARRIVAL_S if arrival_s is None else arrival_s)
        self.kind = kind
        self.size = dist.get_world_size()
        self._rank = dist.get_rank()
        self.local = (self._rank,)
        self._watch = FailureWatch(self._rank)
        self._backend = kind.ranks(dist.group.WORLD)

    def run_local(self, work: Callable[[int], T]) -> dict[int, T]:
        try:
            return {self._rank: work(self._rank)}
        except BaseException as failure:
            reason = self._watch.report(failure)
            if isinstance(failure, WorkerError) and reason != str(failure):
                raise WorkerError(reason) from failure
            raise

    def everywhere(self, work: Callable[[int], T]) -> list[T]:
        mine = self.run_local(work)[self._rank]
        results: list[Any] = [None] * self.size
        dist.all_gather_object(results, mine)
        return results

    def decide(self, choose: Callable[[], T]) -> T:
        # A failure to decide is everybody's: it travels like a decision.
        chosen: list[Any] = [None, None]
        if self._rank == 0:
            try:
                chosen[0] = choose()
            except Exception as failure:
                chosen[1] = failure
        dist.broadcast_object_list(chosen, src=0)
        if chosen[1] is not None:
            raise chosen[1]
        decision: T = chosen[0]
        return decision

    def backend(self, device: int) -> Backend:
        return self._backend

    def close(self) -> None:
        self._watch.stop()
        self._backend.close()
        if self._own_group and dist.is_initialized():
            dist.destroy_process_group()
