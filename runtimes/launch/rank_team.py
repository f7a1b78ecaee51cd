"""The devices of a mesh as ranks of the default process group, one each.

The groups of a mesh are those of torch's ``DeviceMesh`` over the ranks, with dimensions ``pp`` and ``dp``.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...backends import gloo
from ...backends.contract import Backend, Handle, Pair
from ...backends.data_collectives import all_gather_data, broadcast_data
from ...backends.gloo import ENDLESS
from ...backends.kind import BackendKind
from ...core.cluster.mesh import DATA, PIPELINE, Mesh
from ...core.errors import RequestError, WorkerError, message_of
from ..watch.activity import HERE, Watched, WatchedBackend
from ..watch.failure import decoded, encoded, shortened, stopped
from ..watch.positions import timeout_of
from .meeting import Meeting
from .rank_tensors import WHOLE, RankTensors
from .team import Exchange, Team

T = TypeVar("T")

_BACKGROUND_TIMEOUT = timedelta(days=1)
"""Most time that a rank's files may be written later than another's."""
_open: "list[RankTeam]" = []
"""The teams of this process that are not closed. The last one ends the process group that one of them created."""


class RankTeam(Team):
    """Devices that are ranks of the default process group, one each.

    If there is no such group yet, it is created from the environment that ``torchrun`` sets.

    Args:
        kind: the transport between them; one that connects ranks.
        timeout_s: seconds without progress that ranks wait for each other; None as in `timeout_of`.
        meeting: the rendezvous that this process has begun; None for a new one.
        tensors: what a rank has of the model's tensors; parts determine the mesh.
        mesh: over all ranks; by default one pipeline.

    Raises:
        WorkerError: a rank did not arrive in time.
        RequestError: the mesh is for another number of ranks, or differs between ranks.
    """

    def __init__(
        self,
        kind: BackendKind = gloo.KIND,
        timeout_s: float | None = None,
        mesh: Mesh | None = None,
        meeting: Meeting | None = None,
        tensors: RankTensors = WHOLE,
    ) -> None:
        if kind.ranks is None:
            raise RequestError(f"backend '{kind.name}' connects no ranks: give threads, or another backend")
        self._own_group: bool = not dist.is_initialized() or any(team._own_group for team in _open)
        limit = timeout_of(timeout_s)
        with HERE.inside("the start of the pipeline"):
            meeting = meeting or Meeting(limit)
            self.kind, self.tensors = kind, tensors
            self._rank = meeting.rank
            self._others = tuple(other for other in range(meeting.size) if other != self._rank)
            self._watch = meeting.watch
            waiting = HERE.waiting(self._others, "the connection of the ranks")
            with self._watched(), waiting:
                meeting.create_group()
                self._connect(kind, mesh)
        self._closed, self._pid = False, os.getpid()
        _open.append(self)
        self._watch.close = self.close  # at exit, a pipeline that the script left open

    def _connect(self, kind: BackendKind, mesh: Mesh | None) -> None:
        """Create the process groups and transports; all ranks call this together."""
        assert kind.ranks is not None
        self.mesh, groups = device_mesh(self.tensors.mesh(mesh))
        self.replica, position = self.mesh.place(self._rank)
        self.local = (position,)
        self.activities = {position: HERE}
        self._background: Any = None
        self._pipeline = groups.get_group("pp")
        self._replicas: Backend | None = None
        ranks = self.mesh.replicas[self.replica]
        self._pipeline_peers = tuple(rank for rank in ranks if rank != self._rank)
        self._backend = WatchedBackend(kind.ranks(self._pipeline), HERE, ranks)
        if self.replicas > 1:
            same = [replica[position] for replica in self.mesh.replicas]
            self._replicas = WatchedBackend(kind.ranks(groups.get_group("dp")), HERE, same)
        self._same_parts: Backend | None = None
        self._batch_group: dist.ProcessGroup | None = self._pipeline
        self._batch_peers = self._pipeline_peers
        if self.tensors.divided:
            self._connect_batches(kind)

    def _connect_batches(self, kind: BackendKind) -> None:
        """Connect the ranks that share a batch, and those of several batches that have the same parts."""
        self._batch_group, self._batch_peers = None, self._others
        if self.batches == 1:
            return
        replicas = self.mesh.replicas
        batches = [
            sorted(rank for replica in replicas[first : first + self.tensors.size] for rank in replica)
            for first in range(0, len(replicas), self.tensors.size)
        ]
        equal = [
            [replica[position] for replica in replicas[part :: self.tensors.size]]
            for part in range(self.tensors.size)
            for position in range(self.size)
        ]
        batch, same = (next(ranks for ranks in every if self._rank in ranks) for every in (batches, equal))
        self._batch_group, _ = dist.new_subgroups_by_enumeration(batches, ENDLESS, "gloo")
        self._batch_peers = tuple(rank for rank in batch if rank != self._rank)
        group, _ = dist.new_subgroups_by_enumeration(equal, ENDLESS, "gloo")
        assert kind.ranks is not None
        self._same_parts = WatchedBackend(kind.ranks(group), HERE, same)

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
        with self._watched():
            mine = work(self.local[0])
            with HERE.waiting(self._others):
                by_rank = self._exchanged(mine)
        return [by_rank[rank] for rank in self.mesh.cluster_devices]

    def in_replica(self, work: Callable[[int], T]) -> list[T]:
        with self._watched():
            mine = work(self.local[0])
            with HERE.waiting(self._pipeline_peers):
                results: list[T] = self._exchanged(mine, self._pipeline)
        return results

    def _exchanged(self, mine: T, group: Any = None) -> list[T]:
        """The data of all ranks of a group, which have to be in the same method, or they would mistake it."""
        found = all_gather_data([self._rank, HERE.method, mine], group)
        other = next(((rank, method) for rank, method, _ in found if method != HERE.method), None)
        if other is not None:
            raise RequestError(
                f"rank {other[0]} has called {other[1] or 'another function'} and rank {self._rank} "
                f"{HERE.method or 'another function'}: all ranks call the methods of a pipeline in the same order"
            )
        return [data for _, _, data in found]

    def decide(self, choose: Callable[[], T]) -> T:
        # A failure is raised on all ranks: it is broadcast with the decision.
        chosen: list[Any] = [None, None]
        own: Exception | None = None
        if self.first:
            HERE.computing = True
            try:
                chosen[0] = choose()
            except Exception as failure:
                own, chosen[1] = failure, encoded(failure, self._rank)
            finally:
                HERE.computing = False
        source = self.mesh.cluster_devices[0]
        with self._watched(), HERE.waiting(self._others if self._rank == source else (source,)):
            chosen = broadcast_data(chosen, source)
        if chosen[1] is not None:
            raise own or decoded(chosen[1])
        decision: T = chosen[0]
        return decision

    def sum_over_processes(self, numbers: Tensor) -> Handle:
        with self._watched():
            work: Handle = dist.all_reduce(numbers, group=self._batch_group, async_op=True)
        return Watched(work, HERE, self._batch_peers)

    def collectively(self, work: Callable[[], T]) -> T:
        with self._watched(), HERE.waiting(self._others):
            return work()

    def waiting(self, what: str) -> AbstractContextManager[None]:
        return HERE.waiting(self._others, what)

    def agree(self, failure: Exception | None) -> None:
        documents = self.everywhere(lambda _: None if failure is None else encoded(failure, self._rank))
        first = next((document for document in documents if document is not None), None)
        if first is not None:
            raise failure or decoded(first)

    def exchange(self) -> Exchange:
        return Exchange(self._number, self.mesh.ranks, lambda value: self.everywhere(lambda _: value))

    def background_exchange(self) -> Exchange:
        if self._background is None:
            with self._watched(), HERE.waiting(self._others, "the group for checkpoints"):
                self._background = dist.new_group(backend="gloo", timeout=_BACKGROUND_TIMEOUT)

        def gather(value: Any) -> list[Any]:
            try:
                by_rank = all_gather_data(value, self._background)
            except RuntimeError as error:
                raise WorkerError.stopped_answering(self._others, gloo.lost(error)) from error
            return [by_rank[rank] for rank in self.mesh.cluster_devices]

        return Exchange(self._number, self.mesh.ranks, gather)

    @property
    def _number(self) -> int:
        """The number of this rank's device among all devices of all replicas."""
        return self.replica * self.size + self.local[0]

    def connect(self, pairs: Iterable[Pair]) -> None:
        with self._watched():
            self._backend.connect(pairs)

    def clock_offset_ns(self) -> int:
        with self._watched(), HERE.waiting(self._others, "the comparison of the clocks"):
            return clock_offset_ns()

    def backend(self, device: int) -> Backend:
        return self._backend

    def replicas_of(self, device: int) -> Backend | None:
        return self._replicas

    def same_parts_of(self, device: int) -> Backend | None:
        return self._same_parts

    def close(self, failure: BaseException | None = None) -> None:
        if self._closed or os.getpid() != self._pid:  # a fork has the connections of its parent
            return
        self._closed = True
        self._watch.stop(failure)
        self._backend.close()
        if self._replicas is not None:
            self._replicas.close()
        if self._same_parts is not None:
            self._same_parts.close()
        if self._background is not None and dist.is_initialized():
            dist.destroy_process_group(self._background)
        _open.remove(self)
        if self._own_group and not any(team._own_group for team in _open) and dist.is_initialized():
            dist.destroy_process_group()


ROUNDS = 16
"""Exchanges with each rank."""


def offset_of(rounds: Sequence[tuple[int, int, int]]) -> int:
    """The offset of another clock, in the unit of the readings.

    Args:
        rounds: (sent, read, received); the second by the other clock.

    Returns:
        The offset by the round with the shortest trip; 0 if it is within the error of the measurement, as in one host.
    """
    sent, read, received = min(rounds, key=lambda each: each[2] - each[0])
    offset = read - (sent + received) // 2
    return offset if abs(offset) > (received - sent + 1) // 2 else 0


def clock_offset_ns() -> int:
    """Nanoseconds that ``time.perf_counter_ns`` is ahead of rank 0's; all ranks of the job call it together.

    The monotonic clocks of two hosts begin at different times. Rank 0 exchanges messages with every other rank::

        rank 0      sent ─────────────▶ ┐            ┌─▶ received
        rank r                          └─▶ read ────┘                offset = read − (sent + received) / 2

    The reading is between ``sent`` and ``received`` on the clock of rank 0, so the offset is wrong by half of the round
    trip at most. The round with the shortest trip counts (D. L. Mills, "Internet time synchronization", 1991, section
    4). Clocks also run at different speeds, by some microseconds in a second, so each trace has its own measurement.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    world: Any = dist.group.WORLD
    types = {device.type for device in world._device_types}
    on_host = "cpu" in types
    where = torch.device("cpu") if on_host else torch.device(types.pop(), torch.accelerator.current_device_index())
    offsets = torch.zeros(size, dtype=torch.int64, device=where)
    reading = torch.zeros(1, dtype=torch.int64, device=where)
    for other in range(1, size):
        if rank == 0:
            rounds = []
            for _ in range(ROUNDS):
                sent = time.perf_counter_ns()
                dist.send(reading, other)
                dist.recv(reading, other)
                rounds.append((sent, int(reading), time.perf_counter_ns()))
            offsets[other] = offset_of(rounds)
        elif rank == other:
            for _ in range(ROUNDS):
                dist.recv(reading, 0)
                reading.cpu()  # waits for a message to a GPU
                dist.send(reading.fill_(time.perf_counter_ns()), 0)
    dist.broadcast(offsets, 0)
    return int(offsets[rank])


def device_mesh(wanted: Mesh | None) -> tuple[Mesh, DeviceMesh]:
    """The mesh over all ranks, and its process groups. All ranks call this at once.

    Args:
        wanted: the mesh; None for one pipeline over all ranks.

    Raises:
        RequestError: it is for another number of ranks, or differs between ranks.
    """
    ranks = dist.get_world_size()
    mesh = wanted or Mesh(ranks)
    _check(mesh, ranks)
    if mesh.data == 1 and mesh.devices is None:
        return mesh, init_device_mesh("cpu", (ranks,), mesh_dim_names=(PIPELINE,))
    table = torch.tensor(mesh.cluster_devices).view(mesh.data, mesh.pipeline)
    groups = DeviceMesh("cpu", table, mesh_dim_names=(DATA, PIPELINE))
    for name in (DATA, PIPELINE):
        if groups.get_group(name) is not dist.group.WORLD:
            groups.get_group(name)._get_backend(torch.device("cpu"))._set_default_timeout(ENDLESS)
    return mesh, groups


def _check(mesh: Mesh, ranks: int) -> None:
    if sorted(mesh.cluster_devices) != list(range(ranks)):
        raise RequestError(
            f"the mesh has the ranks {sorted(mesh.cluster_devices)} and the job has {ranks}, from 0: give a mesh of "
            "all ranks"
        )
    found = all_gather_data(mesh)
    other = next((rank for rank, there in enumerate(found) if there != found[0]), None)
    if other is not None:
        raise RequestError(
            f"rank {other} has the mesh {_text(found[other])} and rank 0 {_text(found[0])}: every rank must give the "
            "same one"
        )


def _text(mesh: Mesh) -> str:
    order = "" if mesh.devices is None else f" with replicas {', '.join(str(list(each)) for each in mesh.devices)}"
    return f"pp={mesh.pipeline},dp={mesh.data}{order}"
