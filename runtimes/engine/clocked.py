"""Virtual devices: the instructions of all devices run in one process, each at the time that a clock gives its action.

The clock calls `ClockedStep.run_moment` at the moments of ``core/trace/callback.py``; a simulator is a clock. The
instructions are those that threads and ranks run, on tensors of the host::

    ISSUE     send, receive: the instruction runs
    ARRIVAL   the message is copied, and the sender frees it
    START     F, RECOMPUTE run: saved tensors are alive from the start of the action; B, I, W wait for their inputs
    END       B, I, W run: saved tensors are alive until its end

Reductions and optimizer steps run after the clock has stopped.

The clock also decides when each message arrives::

    sender                       clock                      receiver
    1 send: queues tensors                                  1 receive: queues buffers
                                 2 deliver: copies
    3 both handles are done, and the references to the tensors are dropped

A wait for a message that the clock has not delivered yet raises an error: the order of actions is wrong.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from attrs import define, field
from torch import Tensor

from ...backends.contract import Handle
from ...core.actions import SEND_KINDS, Action, Kind
from ...core.capture.export.operators import Operators
from ...core.plan.plan import Plan
from ...core.trace.callback import ActionCallback, CallMoment
from ...core.trace.trace import Trace
from ..launch.progress import Report
from .executor import BoundActions
from .step_data import Message

Clock = Callable[[Plan, ActionCallback], Trace]
"""Runs a step of a plan: calls the callback for every action at its time, and returns the trace."""


class VirtualDevices(Protocol):
    """Devices that this machine does not have: a clock models them."""

    def clock(self, plan: Plan, operators: Operators) -> Clock:
        """The clock of a plan of this captured step.

        Raises:
            RequestError: the times of its operators are unknown.
        """

    def planned(self, operators: Operators, report: Report) -> Plan:
        """A plan of a captured step.

        Raises:
            RequestError: the times of its operators are unknown.
            InfeasibleError: no plan fits in memory.
        """


_AT_START = (Kind.F, Kind.RECOMPUTE)


class ClockedStep:
    """One step of all devices under a clock.

    Attributes:
        exchange: the transport of the devices.
        now_s: the clock's time, in seconds since the start of the step.
    """

    def __init__(self, plan: Plan, bound: Mapping[int, BoundActions]) -> None:
        self.exchange = ClockedExchange()
        self.now_s = 0.0
        self._placement = plan.placement
        self._left = {device: deque(each.compute) for device, each in bound.items()}
        self._known = {device: {one.action for one in each.compute} for device, each in bound.items()}
        self._sent: dict[Action, Message] = {
            one.action: one.message
            for each in bound.values()
            for one in each.compute
            if one.message is not None and one.action.kind in SEND_KINDS
        }

    def run_moment(self, moment: CallMoment, device: int, action: Action, now_s: float) -> None:
        """Run what an action does at this moment; an ``ActionCallback``.

        Args:
            now_s: the clock's time, in seconds since the start of the step.
        """
        self.now_s = now_s
        # A message without tensors for this shape of microbatch has no instruction.
        if action.microbatch is None or action not in self._known[device]:
            return
        if moment is CallMoment.ARRIVAL:
            assert action.peer is not None
            self.exchange.deliver(self._placement[action.peer], device)
            self._sent[action.counterpart].finish_send()
        elif moment is not CallMoment.END or action.kind not in _AT_START:
            self._run_next(moment, device, action)

    def _run_next(self, moment: CallMoment, device: int, action: Action) -> None:
        found, wait, run, *_ = self._left[device][0]
        if found != action:
            raise RuntimeError(f"the clock runs {action} on device {device}, whose next instruction is {found}")
        if wait is not None and moment is not CallMoment.END:
            wait()
        if moment is not CallMoment.START or action.kind in _AT_START:
            self._left[device].popleft()
            run()

    def check_done(self) -> None:
        """Raise an error if an instruction has not run."""
        for device, left in self._left.items():
            if left:
                raise RuntimeError(f"the clock stopped before {left[0].action} on device {device}")


@contextmanager
def one_thread() -> Iterator[None]:
    """Run operators on one thread, as the devices of a process do, so that sums have the same bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(threads)


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
