"""The transport of virtual devices: messages arrive when a clock says so, and not before.

    sender                       clock                      receiver
    1 send: leaves tensors                                  1 receive: leaves buffers
                                 2 deliver: copies
    3 handles of both are done, and nothing of the message is kept

Whoever waits for a message that the clock has not delivered shows that the order of actions is wrong, and is told so.
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
            raise RuntimeError(f"{self.name} is waited for before the clock delivered it")


@define(eq=False)
class ClockedExchange:
    """The messages under way between virtual devices, per ordered pair in order."""

    _sends: dict[tuple[int, int], deque[_End]] = field(factory=dict)
    _receives: dict[tuple[int, int], deque[_End]] = field(factory=dict)

    def deliver(self, src: int, dst: int) -> None:
        """The next message from ``src`` has arrived at ``dst``."""
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
        """Leave one end of a message."""
        end = _End(f"a message from device {src} to device {dst}", tensors)
        (self._sends if sending else self._receives).setdefault((src, dst), deque()).append(end)
        return end


@define(eq=False)
class ClockedTransport:
    """One device's end of the exchange, for messages alone."""

    exchange: ClockedExchange
    device: int

    def send(self, tensors: Sequence[Tensor], peer: int) -> Handle:
        """Send a message to device ``peer``."""
        return self.exchange.post(self.device, peer, tensors, sending=True)

    def receive(self, buffers: Sequence[Tensor], peer: int) -> Handle:
        """Receive the next message of device ``peer``."""
        return self.exchange.post(peer, self.device, buffers, sending=False)
