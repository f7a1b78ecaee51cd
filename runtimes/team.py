"""Teams: the devices of a pipeline, and how something is done on all of them at once.

Planning, profiling and training are written once for both process models: threads of one process, and ranks under
``torchrun``.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..backends.contract import Backend
from ..backends.gloo import GlooBackend
from ..backends.memcpy import Exchange, MemcpyBackend
from ..core.errors import WorkerError
from .watch import FailureWatch

T = TypeVar("T")


class Team(ABC):
    """The devices of a pipeline.

    Attributes:
        size: how many.
        local: the devices that live in this process.
    """

    size: int
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
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.local = tuple(range(size))
        self._exchange = Exchange(size)

    def run_local(self, work: Callable[[int], T]) -> dict[int, T]:
        self._exchange = Exchange(self.size)
        results: dict[int, T] = {}
        failures: dict[int, BaseException] = {}

        def body(device: int) -> None:
            torch.set_num_threads(1)
            try:
                results[device] = work(device)
            except BaseException as failure:
                failures[device] = failure
                self._exchange.fail(device, failure)

        threads = [threading.Thread(target=body, args=(d,), name=f"panpipe device {d}") for d in self.local]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            device, failure = self._exchange.failure or next(iter(failures.items()))
            raise WorkerError(f"device {device} stopped: {type(failure).__name__}: {failure}") from failure
        return {device: results[device] for device in self.local}

    def everywhere(self, work: Callable[[int], T]) -> list[T]:
        return list(self.run_local(work).values())

    def decide(self, choose: Callable[[], T]) -> T:
        return choose()

    def backend(self, device: int) -> Backend:
        return MemcpyBackend(self._exchange, device)

    def close(self) -> None:
        """Threads end with the work they were given."""


class RankTeam(Team):
    """Devices that are ranks of the default process group, one each.

    The group is made from the environment that ``torchrun`` sets where there is none yet.
    """

    def __init__(self) -> None:
        self._own_group = not dist.is_initialized()
        if self._own_group:
            dist.init_process_group("gloo")
        self.size = dist.get_world_size()
        self._rank = dist.get_rank()
        self.local = (self._rank,)
        self._watch = FailureWatch(self._rank)
        self._backend = GlooBackend()

    def run_local(self, work: Callable[[int], T]) -> dict[int, T]:
        try:
            return {self._rank: work(self._rank)}
        except BaseException as failure:
            self._watch.report(failure)
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
