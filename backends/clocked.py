"""The transport of virtual devices: a clock decides when each message arrives.

    sender                       clock                      receiver
    1 send: queues tensors                                  1 receive: queues buffers
                                 2 deliver: copies
    3 both handles are done, and the references to the tensors are dropped

A wait for a message that the clock has not delivered yet raises an error: the order of actions is wrong.
"""

from collections import deque
from collections.abc import Sequence

from attrs import define, field
from torch import Tensor

from .contract import Handle


@define(eq=False)
class _End:
    """One end of a message."""

    name: str
    tensors: Sequence[Tensor] | None

    def wait(self) -> None:
        if self.tensors is not None:
            raise RuntimeError(f"{self.name} was waited for before the clock delivered it: the order is wrong")


@define(eq=False)
class ClockedExchange:
    """The messages in flight between virtual devices: a queue for each ordered pair."""

    _sends: dict[tuple[int, int], deque[_End]] = field(factory=dict)
    _receives: dict[tuple[int, int], deque[_End]] = field(factory=dict)

    def deliver(self, src: int, dst: int) -> None:
        """Copy the next message from ``src`` to ``dst``."""
        send, receive = self._sends[src, dst].popleft(), self._receives[src, dst].popleft()
        assert send.tensors is not None
        assert receive.tensors is not None
        for source, target in zip(send.tensors, receive.tensors, strict=True):
            target.copy_(source)
        send.tensors = receive.tensors = None

    def transport(self, device: int) -> "ClockedTransport":
        """A device's end."""
        return ClockedTransport(self, device)

    def post(self, src: int, dst: int, tensors: Sequence[Tensor], *, sending: bool) -> Handle:
        """Queue one end of a message."""
        end = _End(f"a message from device {src} to device {dst}", tensors)
        (self._sends if sending else self._receives).setdefault((src, dst), deque()).append(end)
        return end


@define(eq=False)
class ClockedTransport:
    """One device's end of the exchange; it has no all-reduce."""

    exchange: ClockedExchange
    device: int

    def send(self, tensors: Sequence[Tensor], peer: int) -> Handle:
        """Send a message to device ``peer``."""
        return self.exchange.post(self.device, peer, tensors, sending=True)

    def receive(self, buffers: Sequence[Tensor], peer: int) -> Handle:
        """Receive the next message of device ``peer``."""
        return self.exchange.post(peer, self.device, buffers, sending=False)
