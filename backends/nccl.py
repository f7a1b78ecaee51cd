"""The nccl backend: one GPU per rank, messages directly between GPUs.

    send on rank a                              receive on rank b
    1 event on the compute stream               1 event on the compute stream
    2 the pair's stream waits for it            2 the pair's stream waits for it
    3 NCCL sends, in the communicator a→b ════▶ 3 NCCL receives, in the communicator a→b
    4 event on the pair's stream ─▶ `wait`      4 event on the pair's stream ─▶ `wait`

NCCL runs the operations of a communicator one after another, in the order in which each rank issued them, and a started
operation waits on the GPU for its counterpart. So every *ordered* pair of ranks has its own communicator, in which one
rank only sends and the other only receives. Its order is the order of messages; lowering gives both ends the same one,
and the validator proves it (`match_messages`). With one communicator for both directions 1F1B would deadlock, because
the two ranks of a pair issue sends and receives in different orders. Different communicators run concurrently, and no
host waits for a device, so the counterpart of every operation is issued independently of other communicators.

All ranks create all communicators, and use each once, in one order: NCCL connects a communicator on its first use, and
the host waits for the other rank then. Each communicator has a stream that nothing else uses: PyTorch has 32 streams of
each priority and assigns them in turns, and two communicators on one stream would again have one common order.

Not run on a GPU yet; tests prove on lowered plans that this assignment of communicators cannot deadlock.
"""

import itertools
import os
import socket
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from attrs import define
from torch import Tensor

from ..core.errors import RequestError, WorkerError
from .contract import Backend, Handle
from .data_collectives import all_gather_data
from .kind import BackendKind
from .streams import Streams, streams_of

CONNECTIONS_VARIABLE, CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS", "32"
"""Hardware queues of a process: if it has more streams, a message that waits could block another stream in the same
queue (CUDA C Programming Guide, environment variables: 8 by default, 32 at most)."""


MOST_COMMUNICATORS = 32
"""Per process: the number of PyTorch's streams of one priority (`c10/cuda/CUDAStream.h`, ``kStreamsPerPool``)."""
_FIRST_SUMS = (1, 1 << 14, 1 << 20, 1 << 23)
"""Elements of the warm-up all-reduces: NCCL connects an algorithm's channels when a size first uses it."""


def communicators(ranks: int) -> list[tuple[int, int]]:
    """The ordered pairs that have a communicator, in the order in which all ranks create them."""
    return list(itertools.permutations(range(ranks), 2))


@define(eq=False)
class _Transfer:
    """A message in flight.

    Args:
        streams: of the GPU.
        device: the GPU.
        span: the timed events before and after it, on the pair's stream.
        tensors: its tensors as contiguous bytes; empty after the wait.
    """

    streams: Streams
    device: torch.device
    span: tuple[Any, Any]
    tensors: Sequence[Tensor]

    def wait(self) -> None:
        if self.tensors:
            self.streams.wait(self.streams.current(self.device), self.span[1])
            self.tensors = ()


class NcclBackend(Backend):
    """One rank's end of a process group whose ranks are the devices, each with its process's current GPU.

    Args:
        group: the group, of any backend; its ranks get the communicators. The default group if None.
    """

    name: ClassVar[str] = "nccl"
    _open: ClassVar[int] = 0
    """Communicators of this process."""

    def __init__(self, group: Any = None) -> None:
        world: Any = dist.group.WORLD if group is None else group
        self._ranks = dist.get_process_group_ranks(world)
        self.device, self.devices = world.rank(), world.size()
        self._check_streams()
        self._gpu = torch.device("cuda", torch.cuda.current_device())
        streams = streams_of(self._gpu)
        assert streams is not None
        self._streams = streams
        self._pairs: dict[tuple[int, int], Any] = {}
        self._all: Any = None
        # All ranks of the job create all groups, also those of other pipelines: torch names groups by a counter.
        found = all_gather_data((self._ranks, _identity(self._gpu)))
        refuse_shared([gpu for _, gpu in found])
        for ranks in sorted({tuple(each) for each, _ in found}):
            self._connect(ranks)
        torch.cuda.synchronize(self._gpu)

    def _check_streams(self) -> None:
        """Refuse more communicators than there are streams; the same on all ranks."""
        wanted = 2 * (self.devices - 1) + (self.devices > 1)
        if NcclBackend._open + wanted > MOST_COMMUNICATORS:
            raise RequestError(
                f"{self.devices} ranks take {wanted} NCCL communicators each, {NcclBackend._open} are open and "
                f"PyTorch has streams for {MOST_COMMUNICATORS}: two on one stream may deadlock; "
                "use fewer ranks, close pipelines that are done, or use backend='gloo'"
            )

    def _connect(self, ranks: tuple[int, ...]) -> None:
        """Create the communicators of a group, which this rank may not be in."""
        mine = list(ranks) == list(self._ranks)
        for pair in communicators(len(ranks)):
            made = _group([ranks[place] for place in pair])
            if mine and self.device in pair:
                self._pairs[pair] = made
                self._first_use(pair)
        if len(ranks) > 1:
            made = _group(list(ranks))
            if mine:
                self._all = made
                for count in _FIRST_SUMS:
                    self.all_reduce(torch.zeros(count, device=self._gpu)).wait()
                    torch.cuda.synchronize(self._gpu)
        if mine:
            NcclBackend._open += len(self._pairs) + (self._all is not None)

    def _first_use(self, pair: tuple[int, int]) -> None:
        """Connect the two ranks now; otherwise the host would wait for it in the middle of the first step."""
        peer = pair[1] if self.device == pair[0] else pair[0]
        probe = torch.zeros(1, device=self._gpu)
        (self.send if self.device == pair[0] else self.receive)([probe], peer).wait()
        torch.cuda.synchronize(self._gpu)

    def send(self, tensors: Sequence[Tensor], peer: int) -> Handle:
        return self._issue((self.device, peer), [_bytes_of(tensor) for tensor in tensors], dist.isend, peer)

    def receive(self, buffers: Sequence[Tensor], peer: int) -> Handle:
        return self._issue((peer, self.device), [_bytes_of(buffer) for buffer in buffers], dist.irecv, peer)

    def _issue(self, pair: tuple[int, int], tensors: Sequence[Tensor], move: Any, peer: int) -> Handle:
        streams, group, rank = self._streams, self._pairs[pair], self._ranks[peer]
        stream = streams.named(stream_name(self._ranks, pair), self._gpu, urgent=True)
        moved = [tensor for tensor in tensors if tensor.numel()]
        ready = streams.record(streams.current(self._gpu))
        try:
            with streams.using(stream):
                streams.wait(stream, ready)
                start = streams.record(stream, timed=True)
                if moved:
                    for work in dist.batch_isend_irecv([dist.P2POp(move, tensor, rank, group) for tensor in moved]):
                        work.wait()  # makes this stream wait for NCCL's; the host does not wait
                end = streams.record(stream, timed=True)
        except RuntimeError as error:
            raise WorkerError.stopped_answering([rank], error) from error
        return _Transfer(streams, self._gpu, (start, end), tensors or (torch.empty(0),))

    def all_reduce(self, tensor: Tensor) -> Handle:
        streams = self._streams
        stream = streams.named(stream_name(self._ranks), self._gpu, urgent=True)
        ready = streams.record(streams.current(self._gpu))
        try:
            with streams.using(stream):
                streams.wait(stream, ready)
                start = streams.record(stream, timed=True)
                if self._all is not None:
                    dist.all_reduce(tensor, group=self._all, async_op=True).wait()
                end = streams.record(stream, timed=True)
        except RuntimeError as error:
            others = [rank for rank in self._ranks if rank != self._ranks[self.device]]
            raise WorkerError.stopped_answering(others, error) from error
        return _Transfer(streams, self._gpu, (start, end), (tensor,))

    def close(self, failure: BaseException | None = None) -> None:
        if failure is None and dist.is_initialized():
            for group in (*self._pairs.values(), *([] if self._all is None else [self._all])):
                dist.destroy_process_group(group)
                NcclBackend._open -= 1
            self._pairs, self._all = {}, None


def stream_name(ranks: Sequence[int], pair: tuple[int, int] | None = None) -> tuple[Any, ...]:
    """The name of the stream of a pair, or of all ranks; different for every communicator, also between replicas.

    Args:
        ranks: of the group, in the job.
        pair: indices in ``ranks``: sender, receiver.
    """
    return ("nccl", "all", *ranks) if pair is None else ("nccl", "pair", *(ranks[place] for place in pair))


def _group(ranks: list[int]) -> Any:
    """A group with its own communicator, on a stream with higher priority than compute."""
    return dist.new_group(ranks, backend="nccl", pg_options=dist.ProcessGroupNCCL.Options(is_high_priority_stream=True))


def _identity(gpu: torch.device) -> str:
    """A name for a GPU that is the same on every rank, independent of CUDA_VISIBLE_DEVICES."""
    known = torch.cuda.get_device_properties(gpu)
    return f"GPU {getattr(known, 'uuid', gpu)} of {socket.gethostname()}"


def refuse_shared(gpus: Sequence[str]) -> None:
    """Refuse ranks that share a GPU, on all ranks together; NCCL would fail while it connects.

    Args:
        gpus: of each rank.

    Raises:
        RequestError: two ranks have the same one.
    """
    for rank, gpu in enumerate(gpus):
        if gpu in gpus[:rank]:
            raise RequestError(
                f"ranks {gpus.index(gpu)} and {rank} are both on {gpu}: NCCL needs one GPU per rank; start as many "
                "ranks as there are GPUs, or use backend='gloo'"
            )


def _bytes_of(tensor: Tensor) -> Tensor:
    """A tensor's bytes, a view if it is contiguous: NCCL does not support every dtype."""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def missing() -> str | None:
    """The reason why NCCL is not available; None if it is."""
    if not dist.is_available():
        return "this build of PyTorch has no torch.distributed"
    if not dist.is_nccl_available():
        return "this build of PyTorch has no NCCL"
    if not torch.cuda.is_available():
        return "PyTorch finds no GPU"
    if not torch.cuda.is_initialized():
        os.environ.setdefault(CONNECTIONS_VARIABLE, CONNECTIONS)
    return None


def limits() -> str | None:
    """The limits of NCCL on this machine; None for none."""
    gpus = torch.cuda.device_count()
    if gpus > 1:
        return None
    return (
        "it needs one GPU per rank and there is 1 GPU here: use one rank per machine, or let stages share the GPU over "
        "memcpy, as in devices='cuda:0,cuda:0' with share_devices=True"
    )


KIND = BackendKind(
    "nccl", "NCCL between ranks with one GPU each, a communicator for each ordered pair; has not run on a GPU yet",
    ranks=NcclBackend, device_types=frozenset({"cuda"}), detects_dead_peers=False, missing=missing, limits=limits,
)  # fmt: skip
