"""The nccl backend: one GPU per rank, messages directly between GPUs.

    send on rank a                              receive on rank b
    1 event on the compute stream               1 event on the compute stream
    2 the pair's stream waits for it            2 `wait`: the pair's stream waits for it
    3 NCCL sends, in the communicator a→b ════▶ 3 NCCL receives, in the communicator a→b
    4 event on the pair's stream ─▶ `wait`      4 event on the pair's stream ─▶ the compute stream

NCCL runs the operations of a communicator one after another, in the order in which each rank issued them, and a started
operation occupies the GPU until its counterpart has started. So every *ordered* pair of ranks has its own communicator,
in which one rank only sends and the other only receives. Its order is the order of messages; lowering gives both ends
the same one, and the validator proves it (`queues_of`). With one communicator for both directions 1F1B would
deadlock, because the two ranks of a pair issue sends and receives in different orders. Different communicators run
concurrently.

The host waits for the device at times that it does not choose: when CUDA loads a kernel on its first use, when the
allocator returns memory to CUDA, when pinned memory is allocated, when a kernel is tuned. It then waits for everything
that it has issued, also for a receive whose message has not been sent. If that message depends on compute which this
host has not issued yet, the pipeline hangs. So a receive is only *recorded* when it is posted, and issued when it is
waited for, directly before the action that reads it: the order of issue is that of `lower` with ``prefetch=0``. The
transfer still overlaps with compute, because it waits for the event of its posting and not for the actions between.
``tests/backends/test_nccl.py`` proves for all schedules that hosts which wait for every receive they have issued do not
hang. Hosts that also wait for their sends, all at the same time, hang by interleaved schedules in any order of issue.
So all programs run once before the first message (``occupies_device``): kernels are then loaded and tuned.

A pair has a communicator only if the plan sends between its two ranks (`connect`). Both ranks create communicators in
one order and use each once: NCCL connects on first use, and the host waits for the other rank then. Each communicator
has a stream that nothing else uses. Sums run on the stream that they are issued to, so NCCL's own stream is not used.

Not run on a GPU yet. On one GPU ``make cuda`` runs a communicator of one rank; the tests marked ``cuda`` need two GPUs.

``CUDA_DEVICE_MAX_CONNECTIONS`` sets the number of hardware queues of a process. One with more streams than queues puts
several streams into one. A message that waits then blocks the streams after it in the queue (CUDA C Programming Guide,
environment variables: 8 by default, 32 at most). CUDA reads the variable when it is initialized, so the package sets it
when it is imported (``__init__.py``). Part ``queues`` of ``benchmarks/gpu`` counts the streams that wait for another
one.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.errors import RequestError, WorkerError, warn_caller
from .contract import Backend, Handle, Pair
from .data_collectives import all_gather_data
from .kind import BackendKind, identity
from .nccl_groups import Communicator, check_count, pair_communicator, sum_communicator
from .nccl_transfers import Channel, MessageSlot, Receive, Transfer, batches, load, unload
from .streams import streams_of

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_DEFAULT = 8


@cache
def warn_of_few_connections() -> None:
    """Warn once if the process has fewer queues than a pipeline over NCCL has streams: two for each communicator."""
    given = os.environ.get(VARIABLE)
    count = int(given) if given is not None and given.isdecimal() else _DEFAULT
    if count < 2 * _DEFAULT:
        warn_caller(
            f"{VARIABLE} is {given or 'not set'}, so streams share {count} hardware queues and a message that waits "
            f"may stop compute: set {VARIABLE}=32 before CUDA is initialized",
        )


_FIRST_SUMS = (1, 1 << 14, 1 << 20, 1 << 23)
"""Elements of the warm-up all-reduces: NCCL connects an algorithm's channels when a size first uses it."""


class NcclBackend(Backend):
    """One rank's end of a process group whose ranks are the devices, each with its process's current GPU.

    Creating it is collective over the group. `connect` creates the communicators of pairs.

    Args:
        group: the group, of any backend; its ranks get the communicators. The default group if None.
        device: the GPU; the process's current one if None.
        pairs: creates the communicator of a pair, from its ranks in the job and this rank's index among them.
        sums: creates the communicator of all ranks, likewise.
    """

    name: ClassVar[str] = "nccl"
    occupies_device: bool = True
    _open: ClassVar[int] = 0
    """Communicators of this process."""

    def __init__(
        self,
        group: Any = None,
        device: torch.device | None = None,
        pairs: Callable[[Sequence[int], int], Communicator] = pair_communicator,
        sums: Callable[[Sequence[int], int], Communicator] = sum_communicator,
    ) -> None:
        world: Any = dist.group.WORLD if group is None else group
        self._ranks = dist.get_process_group_ranks(world)
        self.device, self.devices = world.rank(), world.size()
        self._gpu = torch.device("cuda", torch.cuda.current_device()) if device is None else device
        warn_of_few_connections()
        streams = streams_of(self._gpu)
        assert streams is not None
        self._streams, self._new_pair = streams, pairs
        self._channels: dict[Pair, Channel] = {}
        self._all: Communicator | None = None
        if self.devices > 1:
            if self._gpu.type == "cuda":
                refuse_shared(all_gather_data(identity(self._gpu)))
            check_count(1, NcclBackend._open)
            self._all = sums(self._ranks, self.device)
            NcclBackend._open += 1
            for count in _FIRST_SUMS:
                self.all_reduce(torch.zeros(count, device=self._gpu)).wait()
            streams.synchronize(self._gpu)

    @property
    def communicators(self) -> int:
        """The number of its communicators."""
        return len(self._channels) + (self._all is not None)

    def connect(self, pairs: Iterable[Pair]) -> None:
        # Two ranks that wait for each other have created all earlier pairs: the order is the same everywhere.
        new = [pair for pair in sorted(set(pairs)) if self.device in pair and pair not in self._channels]
        check_count(len(new), NcclBackend._open)
        for pair in new:
            peer = self._ranks[pair[1] if self.device == pair[0] else pair[0]]
            communicator = self._new_pair([self._ranks[place] for place in pair], pair.index(self.device))
            NcclBackend._open += 1
            stream = self._streams.named(stream_name(self._ranks, pair), self._gpu, urgent=True)
            self._channels[pair] = Channel(communicator, peer, stream, MessageSlot(self._gpu))
            self._use_once(pair)

    def _use_once(self, pair: Pair) -> None:
        """Send one number through a new communicator."""
        probe = [torch.zeros(1, device=self._gpu)]
        (self.send(probe, pair[1]) if self.device == pair[0] else self.receive(probe, pair[0])).wait()
        self._streams.synchronize(self._gpu)

    def _channel(self, pair: Pair) -> Channel:
        if pair not in self._channels:
            raise RequestError(
                f"device {pair[0]} sends to device {pair[1]} over nccl, and connect() did not name this pair: call it "
                "with all pairs that send, on all devices"
            )
        return self._channels[pair]

    def send(self, tensors: Sequence[Tensor], peer: int) -> Handle:
        channel, views = self._channel((self.device, peer)), [_bytes_of(tensor) for tensor in tensors]
        return self._issue(channel, self._ready(), tensors, views, sending=True)  # ready includes a copy of a layout

    def receive(self, buffers: Sequence[Tensor], peer: int) -> Handle:
        channel = self._channel((peer, self.device))
        posted = Receive(self._issue_receive, channel, self._ready(), buffers)
        channel.posted.append(posted)
        return posted

    def _ready(self) -> Any:
        return self._streams.record(self._streams.current(self._gpu))

    def _issue_receive(self, posted: Receive) -> Transfer:
        views = [_bytes_of(buffer) for buffer in posted.buffers]
        return self._issue(posted.channel, posted.ready, posted.buffers, views, sending=False)

    def _issue(
        self, channel: Channel, ready: Any, tensors: Sequence[Tensor], views: Sequence[Tensor], *, sending: bool
    ) -> Transfer:
        """Issue a message, whose tensors have these bytes, after an event."""
        streams, stream = self._streams, channel.stream
        try:
            with streams.using(stream):
                streams.wait(stream, ready)
                start = streams.record(stream, timed=True)
                for batch in batches([view.numel() for view in views]):
                    slot = channel.slot.of(batch[-1].end)
                    if sending:
                        load(slot, views, batch)
                        channel.communicator.send(slot, 1)
                    else:
                        channel.communicator.receive(slot, 0)
                        unload(slot, views, batch)
                end = streams.record(stream, timed=True)
        except RuntimeError as error:
            raise WorkerError.stopped_answering([channel.rank], error) from error
        return Transfer(streams, self._gpu, (start, end), (*tensors, *views) or (torch.empty(0),))

    def all_reduce(self, tensor: Tensor) -> Handle:
        return self._together([tensor], lambda each: each.all_reduce(tensor))

    def reduce_scatter(self, tensor: Tensor) -> Handle:
        return self._together([tensor], lambda each: each.reduce_scatter(tensor))

    def all_gather(self, tensor: Tensor) -> Handle:
        return self._together([tensor], lambda each: each.all_gather(tensor))

    def broadcast(self, tensors: Sequence[Tensor], source: int) -> Handle:
        views = [_bytes_of(tensor) for tensor in tensors if tensor.numel()]

        def run(communicator: Communicator) -> None:
            for view in views:
                communicator.broadcast(view, source)

        return self._together([*tensors, *views], run)

    def _together(self, tensors: Sequence[Tensor], run: Callable[[Communicator], None]) -> Handle:
        """Issue operations of all ranks to the stream of their communicator, on which they run."""
        streams, stream = self._streams, self._streams.named(stream_name(self._ranks), self._gpu, urgent=True)
        ready = self._ready()
        try:
            with streams.using(stream):
                streams.wait(stream, ready)
                start = streams.record(stream, timed=True)
                if self._all is not None:
                    run(self._all)
                end = streams.record(stream, timed=True)
        except RuntimeError as error:
            others = [rank for rank in self._ranks if rank != self._ranks[self.device]]
            raise WorkerError.stopped_answering(others, error) from error
        return Transfer(streams, self._gpu, (start, end), tensors or (torch.empty(0),))

    def close(self, failure: BaseException | None = None) -> None:
        if failure is None:
            communicators = [channel.communicator for channel in self._channels.values()]
            for each in communicators if self._all is None else [*communicators, self._all]:
                each.close()
                NcclBackend._open -= 1
            self._channels, self._all = {}, None


def stream_name(ranks: Sequence[int], pair: Pair | None = None) -> tuple[Any, ...]:
    """The name of the stream of a pair, or of all ranks; different for every communicator, also between replicas.

    Args:
        ranks: of the group, in the job.
        pair: indices in ``ranks``: sender, receiver.
    """
    return ("nccl", "all", *ranks) if pair is None else ("nccl", "pair", *(ranks[place] for place in pair))


def refuse_shared(gpus: Sequence[str]) -> None:
    """Refuse ranks that share a GPU, on all ranks together; NCCL would fail while it connects.

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
    return None


def limits() -> str | None:
    """The limits of NCCL on this machine; None for none."""
    gpus = torch.cuda.device_count()
    if gpus > 1:
        return None
    return (
        "it needs one GPU per rank and there is 1 GPU here: use one rank per machine, or let stages share the GPU over "
        "memcpy, as in devices='cuda:0,cuda:0' with run=panpipe.Run(share_devices=True)"
    )


KIND = BackendKind(
    "nccl", "NCCL between ranks with one GPU each, a communicator for each ordered pair; has not run on a GPU yet",
    ranks=NcclBackend, device_types=frozenset({"cuda"}), detects_dead_peers=False, missing=missing, limits=limits,
)  # fmt: skip
