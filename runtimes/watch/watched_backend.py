"""A backend that records each of its waits in the device's `Activity`, with the rank that it waits for."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from ...backends.contract import Backend, Handle, Pair
from .activity import Activity


class _Watched:
    """A handle whose wait is noted. Other attributes, such as ``span``, are the transport's own."""

    __slots__ = ("_activity", "_handle", "_on")

    def __init__(self, handle: Handle, activity: Activity, on: tuple[int, ...]) -> None:
        self._handle, self._activity, self._on = handle, activity, on

    def wait(self) -> None:
        """See :class:`Handle`."""
        activity = self._activity
        before, activity.on = activity.on, self._on
        try:
            self._handle.wait()
        finally:
            activity.on = before
            activity.count += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


class WatchedBackend(Backend):
    """A device's end of a transport, with noted waits.

    Args:
        end: the transport's own.
        activity: of the device.
        numbers: for each device of the transport its number in the activity.
    """

    def __init__(self, end: Backend, activity: Activity, numbers: Sequence[int]) -> None:
        self.end, self._activity = end, activity
        self.device, self.devices = end.device, end.devices
        self.occupies_device = end.occupies_device  # `__getattr__` is not called for what `Backend` defines
        self._peers = [(number,) for number in numbers]
        self._others = tuple(number for device, number in enumerate(numbers) if device != end.device)

    def connect(self, pairs: Iterable[Pair]) -> None:
        with self._activity.waiting(self._others, "the connection of the ranks"):
            self.end.connect(pairs)

    def send(self, tensors: Sequence[Tensor], peer: int) -> Handle:
        return _Watched(self.end.send(tensors, peer), self._activity, self._peers[peer])

    def receive(self, buffers: Sequence[Tensor], peer: int) -> Handle:
        return _Watched(self.end.receive(buffers, peer), self._activity, self._peers[peer])

    def all_reduce(self, tensor: Tensor) -> Handle:
        return watched(self.end.all_reduce(tensor), self._activity, self._others)

    def broadcast(self, tensors: Sequence[Tensor], source: int) -> Handle:
        on = self._others if source == self.device else self._peers[source]
        return watched(self.end.broadcast(tensors, source), self._activity, on)

    def reduce_scatter(self, tensor: Tensor) -> Handle:
        return watched(self.end.reduce_scatter(tensor), self._activity, self._others)

    def all_gather(self, tensor: Tensor) -> Handle:
        return watched(self.end.all_gather(tensor), self._activity, self._others)

    def free_addends(self) -> None:
        self.end.free_addends()

    def close(self, failure: BaseException | None = None) -> None:
        self.end.close(failure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.end, name)


def watched(handle: Handle, activity: Activity, on: tuple[int, ...]) -> Handle:
    """A handle whose wait for some ranks is noted."""
    return _Watched(handle, activity, on)
