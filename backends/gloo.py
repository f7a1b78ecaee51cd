"""The gloo backend: processes, tensors on the CPU, one message after another over the process group's sockets.

Two ranks have one connection per process group, and a send on it blocks receives. So there are two groups, one for
messages to higher ranks and one for messages to lower ranks: an action of empty stages takes 125 to 165 µs instead of
190 (two ranks, 32 bytes, torch 2.13, loopback, two cores). Both are created here. The group that is given may have
another transport for each type of device, such as ``cpu:gloo,cuda:nccl``, and would move a GPU's tensors over NCCL.

A reduce-scatter is messages between all pairs, as in the contract: gloo's own (``_reduce_scatter_base``) is an
all-reduce of everything into memory of its own. With 16 MiB over two ranks the messages take 7.1 ms, gloo's all-reduce
12.6 ms and its reduce-scatter 21.4 ms (torch 2.13, loopback, two cores).
"""

import re
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor

from ..core.errors import WorkerError, message_of
from .contract import Backend, Handle
from .data_collectives import group_store
from .kind import BackendKind

ENDLESS = timedelta(days=365)
"""The limit of a group's waits: the runtime decides how long ranks wait for each other."""
LATE_BELOW_BYTES = 1 << 16
"""Receives of messages below this size are posted late: one at a time, when the one before it has arrived.

The sender's handle ends only after the receive was posted, so those of sums and gathers are posted at once: the other
device may not wait for them before this one waits for something else.

If small receives are posted early, gloo's thread competes with the compute thread for its core: 155 µs per action
instead of 78 µs with 32 bytes, two ranks and 30 µs of compute on two cores. At 512 KiB posting early is faster: 123 µs
instead of 247 µs (torch 2.13, loopback).
"""


@define(eq=False)
class _Sent:
    """A message in flight. gloo's handles can only be waited for; they have no test for completion."""

    _works: list[Any]
    _rank: int

    def wait(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise WorkerError.stopped_answering([self._rank], lost(error)) from error
        self._works = []  # they reference the tensors, and a trace keeps the handle


@define(eq=False)
class _Receive:
    """A receive that is posted immediately or later, and never before the earlier ones in its queue."""

    _group: Any
    _queue: "deque[_Receive]"
    _targets: Sequence[Tensor]
    _peer: int
    _rank: int
    _buffers: Sequence[Tensor] = field(init=False)
    _works: list[Any] | None = None

    def __attrs_post_init__(self) -> None:
        self._buffers = _on_host(self._targets)
        self._queue.append(self)

    def post(self) -> None:
        """Post all earlier receives in the queue, then this one."""
        while True:
            first = self._queue.popleft()
            first._works = [first._group.recv([buffer], first._peer, 0) for buffer in first._buffers]
            if first is self:
                return

    def wait(self) -> None:
        try:
            if self._works is None:
                self.post()
            for work in self._works or ():
                work.wait()
            if self._targets is not self._buffers:
                for buffer, target in zip(self._buffers, self._targets, strict=True):
                    target.copy_(buffer)
            self._works, self._buffers, self._targets = [], [], []  # for the same reason as in _Sent
            if self._queue:
                self._queue[0].post()
        except RuntimeError as error:
            raise WorkerError.stopped_answering([self._rank], lost(error)) from error


@define(eq=False)
class _Sum:
    """A sum in flight: gloo's ring all-reduce, in which one rank sums each part and the others receive it."""

    _end: "GlooBackend"
    _work: Any
    _summed: Tensor
    _target: Tensor
    ended_ns: int | None = None

    def watch(self) -> None:
        """Record the end of the sum in ``ended_ns``, by ``time.perf_counter_ns``. gloo's thread sets it before `wait`
        returns."""
        self._work.get_future().add_done_callback(self._note)

    def _note(self, _: Any) -> None:
        self.ended_ns = time.perf_counter_ns()

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._end.missed_in_sum(error) from error
        if self._target is not self._summed:
            self._target.copy_(self._summed)
            self._target = self._summed


class GlooBackend(Backend):
    """One rank's end of two gloo process groups whose ranks are the devices.

    Creating it is collective: all ranks create the groups. Errors have the ranks' numbers in the job.

    Args:
        group: a group of these ranks, of any transport; the default one if None.
    """

    name: ClassVar[str] = "gloo"

    def __init__(self, group: Any = None) -> None:
        given: Any = dist.group.WORLD if group is None else group
        self._ranks = dist.get_process_group_ranks(given)
        self.device = given.rank()
        self.devices = given.size()
        self._up: Any = _gloo_group(self._ranks, self.device)
        self._down: Any = _gloo_group(self._ranks, self.device)
        self._waiting: list[deque[_Receive]] = [deque() for _ in range(self.devices)]

    def send(self, tensors: Sequence[Tensor], peer: int) -> Handle:
        group = self._up if peer > self.device else self._down
        try:
            return _Sent([group.send([_plain(tensor)], peer, 0) for tensor in tensors], self._ranks[peer])
        except RuntimeError as error:
            raise WorkerError.stopped_answering([self._ranks[peer]], lost(error)) from error

    def receive(self, buffers: Sequence[Tensor], peer: int) -> Handle:
        return self._receive(buffers, peer, late=sum(buffer.nbytes for buffer in buffers) < LATE_BELOW_BYTES)

    def receive_now(self, buffers: Sequence[Tensor], peer: int) -> Handle:
        return self._receive(buffers, peer, late=False)

    def _receive(self, buffers: Sequence[Tensor], peer: int, *, late: bool) -> Handle:
        group = self._up if peer < self.device else self._down
        receive = _Receive(group, self._waiting[peer], buffers, peer, self._ranks[peer])
        if not late:
            try:
                receive.post()
            except RuntimeError as error:
                raise WorkerError.stopped_answering([self._ranks[peer]], lost(error)) from error
        return receive

    def all_reduce(self, tensor: Tensor) -> Handle:
        here = tensor.cpu() if tensor.is_cuda else tensor
        try:
            return _Sum(self, self._up.allreduce([here]), here, tensor)
        except RuntimeError as error:
            raise self.missed_in_sum(error) from error

    def missed_in_sum(self, error: RuntimeError) -> WorkerError:
        """The error for a sum that failed; gloo does not report which rank caused it."""
        others = [rank for rank in self._ranks if rank != self._ranks[self.device]]
        return WorkerError.stopped_answering(others, lost(error))

    def close(self, failure: BaseException | None = None) -> None:
        """Release the groups; the one that was given belongs to the caller. Further calls have no effect."""
        if failure is None:
            self._up = self._down = None


def lost(error: BaseException) -> str:
    """The reason of a gloo failure in plain words; other failures unchanged, on one line.

    gloo's text begins with a position in its source code and ends with an address:
    ``[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:28137``.
    """
    text = message_of(error)
    if "third_party/gloo" not in text and "gloo/transport" not in text:
        return " ".join(text.split())
    if any(sign in text for sign in _CLOSED):
        return "its connection closed"
    if "imed out" in text:
        return "no answer came in time"
    return " ".join(re.sub(r"\[\S*gloo\S*\]", "", text).split())


_CLOSED = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Software caused connection abort")


def _gloo_group(ranks: Sequence[int], place: int) -> Any:
    """Create a gloo group of some ranks of the job; collective over these ranks alone."""
    return dist.ProcessGroupGloo(group_store("gloo", ranks, place), place, len(ranks), ENDLESS)


def _on_host(buffers: Sequence[Tensor]) -> Sequence[Tensor]:
    """The buffers, or host buffers in their place if any is on a GPU."""
    if not any(buffer.is_cuda for buffer in buffers):
        return buffers
    return [torch.empty(buffer.shape, dtype=buffer.dtype) for buffer in buffers]


def _plain(tensor: Tensor) -> Tensor:
    """The tensor as gloo requires it: contiguous in host memory. gloo's work keeps the copy if one is needed; the host
    waits for a copy from a GPU."""
    if tensor.is_cuda:
        tensor = tensor.cpu()
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.resolve_conj().resolve_neg().contiguous()


def missing() -> str | None:
    """The reason why gloo is not available; None if it is."""
    if not dist.is_available():
        return "this build of PyTorch has no torch.distributed"
    return None if dist.is_gloo_available() else "this build of PyTorch has no gloo"


KIND = BackendKind(
    "gloo", "the sockets of a gloo process group, between processes; tensors of GPUs go through the host's memory",
    ranks=GlooBackend, device_types=frozenset({"cpu", "cuda"}), missing=missing,
)  # fmt: skip
