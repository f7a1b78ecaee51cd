"""Communicators for the nccl backend where there is no GPU.

`FakeJob` has all ranks in one process: it records what their backends issue, and moves nothing. With `OVER_GLOO` the
backend's own code moves bytes between processes on the CPU, over gloo in place of NCCL.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field
from panpipe.backends import nccl, streams
from panpipe.backends.data_collectives import group_store
from panpipe.backends.kind import BackendKind
from panpipe.backends.nccl import NcclBackend

CPU = torch.device("cpu")


@define
class Group:
    """A group of some ranks of the job, as one of them sees it."""

    ranks: list[int]
    me: int

    def rank(self) -> int:
        return self.ranks.index(self.me)

    def size(self) -> int:
        return len(self.ranks)


@define
class Issued:
    """A send or a receive; the peer by its rank in the job."""

    kind: str
    tensor: torch.Tensor
    peer: int


@define(eq=False)
class FakeCommunicator:
    """A communicator that moves nothing."""

    job: "FakeJob"
    ranks: Sequence[int]

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        self.job.issued.append(Issued("send", tensor, self.ranks[rank]))

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        self.job.issued.append(Issued("receive", tensor, self.ranks[rank]))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Nothing is moved."""

    def reduce_scatter(self, tensor: torch.Tensor) -> None:
        """Nothing is moved."""

    def all_gather(self, tensor: torch.Tensor) -> None:
        """Nothing is moved."""

    def broadcast(self, tensor: torch.Tensor, rank: int) -> None:
        """Nothing is moved."""

    def close(self) -> None:
        self.job.communicators.remove(self)


@define
class FakeJob:
    """The ranks of a job.

    Attributes:
        issued: sends and receives, in order.
        communicators: all that are open, each end by itself.
    """

    issued: list[Issued] = field(factory=list)
    communicators: list[FakeCommunicator] = field(factory=list)

    def get_process_group_ranks(self, group: Group) -> list[int]:
        """In the place of torch.distributed's."""
        return group.ranks

    def end(self, ranks: Sequence[int], rank: int) -> NcclBackend:
        """The backend of a rank in a group."""

        def communicator(members: Sequence[int], place: int) -> FakeCommunicator:
            assert members[place] == rank
            self.communicators.append(FakeCommunicator(self, members))
            return self.communicators[-1]

        return NcclBackend(Group(list(ranks), rank), CPU, communicator, communicator)


def install(monkeypatch: Any) -> FakeJob:
    """Put a fake in the place of torch.distributed, and the host in that of CUDA's streams."""
    fake = FakeJob()
    monkeypatch.setattr(nccl, "dist", fake)
    monkeypatch.setattr(nccl, "_FIRST_SUMS", (1,))
    monkeypatch.setattr(NcclBackend, "_open", 0)
    monkeypatch.setitem(streams._KINDS, "cpu", HostStreams())
    return fake


class HostStreams(streams.Streams):
    """Streams of a device that runs operations synchronously, but for sends: an event has those of its stream."""

    def __init__(self) -> None:
        super().__init__()
        self.active: Any = None
        self.sends: dict[Any, list[Any]] = {}

    def new(self, device: torch.device, urgent: bool) -> Any:
        return object()

    def current(self, device: torch.device) -> Any:
        return None

    @contextmanager
    def using(self, *given: Any) -> Iterator[None]:
        before, self.active = self.active, given[-1]
        yield
        self.active = before

    def record(self, stream: Any, *, timed: bool = False) -> list[Any]:
        return list(self.sends.get(stream, ()))

    def wait(self, stream: Any, event: list[Any]) -> None:
        if stream is None:  # the end of a transfer, before the caller uses its tensors
            for send in event:
                send.wait()

    def upload(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.clone()

    def download(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        held = tensor.clone()
        return lambda: held

    def finish(self, stream: Any) -> None:
        """It has run."""

    def synchronize(self, device: torch.device) -> None:
        """It has run."""

    def elapsed_s(self, start: Any, end: Any) -> float:
        return 1e-6


class GlooCommunicator:
    """Gloo in the place of NCCL: the host waits for receives, and not for sends."""

    def __init__(self, ranks: Sequence[int], place: int) -> None:
        store = group_store("nccl", ranks, place)
        self._streams: Any = streams._KINDS["cpu"]
        self._group: Any = dist.ProcessGroupGloo(store, place, len(ranks), timedelta(seconds=600))

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        kept = tensor.clone()  # the slot is used again, and gloo's send ends with its receive
        self._streams.sends.setdefault(self._streams.active, []).append(_Sent(kept, self._group.send([kept], rank, 0)))

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        self._group.recv([tensor], rank, 0).wait()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._group.allreduce([tensor]).wait()

    def reduce_scatter(self, tensor: torch.Tensor) -> None:
        self.all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor) -> None:
        if tensor.numel():
            parts = [torch.empty_like(part) for part in tensor.chunk(self._group.size())]
            self._group.allgather([parts], [tensor.chunk(self._group.size())[self._group.rank()]]).wait()
            torch.cat(parts, out=tensor)

    def broadcast(self, tensor: torch.Tensor, rank: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = rank, 0
        self._group.broadcast([tensor], options).wait()

    def close(self) -> None:
        """Gloo's group ends with its last reference."""


@define(eq=False)
class _Sent:
    """A send in flight, with its tensor."""

    tensor: torch.Tensor
    work: Any

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        self.work = None


def over_gloo(group: Any) -> NcclBackend:
    """This rank's end."""
    streams._KINDS.setdefault("cpu", HostStreams())
    return NcclBackend(group, CPU, GlooCommunicator, GlooCommunicator)


OVER_GLOO = BackendKind("nccl over gloo", "for tests", ranks=over_gloo, detects_dead_peers=False)
