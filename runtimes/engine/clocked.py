"""Virtual devices: the instructions of all of them in one process, each run when a clock comes to its action.

The clock is whatever calls `perform` at the moments of ``core/trace/callback.py``; a simulator, for instance. What runs
are the very instructions that threads and ranks run, on tensors of the host::

    ISSUE     send, receive: the instruction runs
    ARRIVAL   the message is copied, and its sender lets go of it
    START     F, RECOMPUTE run: saved tensors are there from the start of the action
    END       B, I, W run: saved tensors are there until its end

Reductions and optimizer steps are left for the end of the step, where the clock has stopped.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch

from ...backends.clocked import ClockedExchange
from ...core.actions import SEND_KINDS, Action, Kind
from ...core.capture.export.operators import Operators
from ...core.plan.plan import Plan
from ...core.trace.callback import ActionCallback, Moment
from ...core.trace.trace import Trace
from ..launch.progress import Report
from .executor import Bound
from .mail import Mail

Clock = Callable[[Plan, ActionCallback], Trace]
"""Runs a step of a plan, has every action performed in its time, and returns the trace of it."""


class VirtualDevices(Protocol):
    """Devices that are not there."""

    def clock(self, plan: Plan, operators: Operators) -> Clock:
        """The clock of a plan of this captured step.

        Raises:
            RequestError: there is nothing to time it by.
        """

    def planned(self, operators: Operators, report: Report) -> Plan:
        """A plan of a captured step.

        Args:
            operators: of the step.
            report: called with what planning is doing.

        Raises:
            RequestError: there is nothing to plan by.
            InfeasibleError: no plan fits in memory.
        """


_AT_THE_START = (Kind.F, Kind.RECOMPUTE)


class ClockedWalk:
    """One step of all devices under a clock.

    Args:
        plan: that the clock runs.
        bound: the instructions of every device.

    Attributes:
        exchange: the transport that the instructions talk over.
        now_s: the clock.
    """

    def __init__(self, plan: Plan, bound: Mapping[int, Bound]) -> None:
        self.exchange = ClockedExchange()
        self.now_s = 0.0
        self._placement = plan.placement
        self._left = {device: iter(each.compute) for device, each in bound.items()}
        self._known = {device: {one.action for one in each.compute} for device, each in bound.items()}
        self._sent: dict[Action, Mail] = {
            one.action: one.mail
            for each in bound.values()
            for one in each.compute
            if one.mail is not None and one.action.kind in SEND_KINDS
        }

    def perform(self, moment: Moment, device: int, action: Action, now_s: float) -> None:
        """Do what an action does at this moment (a ``ActionCallback``)."""
        self.now_s = now_s
        # A message that is empty for this shape of microbatch has no instruction.
        if action.microbatch is None or action not in self._known[device]:
            return
        if moment is Moment.ARRIVAL:
            assert action.peer is not None
            self.exchange.deliver(self._placement[action.peer], device)
            self._sent[action.counterpart].settle()
        elif moment is Moment.ISSUE or (moment is Moment.START) == (action.kind in _AT_THE_START):
            self._run(device, action)

    def _run(self, device: int, action: Action) -> None:
        found, wait, run, *_ = next(self._left[device])
        if found != action:
            raise RuntimeError(f"the clock comes to {action} on device {device}, whose next instruction is {found}")
        if wait is not None:
            wait()
        run()

    def check_done(self) -> None:
        """Every instruction has run."""
        for device, left in self._left.items():
            one = next(left, None)
            if one is not None:
                raise RuntimeError(f"the clock stopped in front of {one.action} on device {device}")


@contextmanager
def one_thread() -> Iterator[None]:
    """Operators on one thread, as the devices of a process have it: the same sums to the last bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(threads)
