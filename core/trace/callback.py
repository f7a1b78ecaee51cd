"""The callback of a simulated step: called for each action as it happens, for instance to execute it.

The simulator models times and executes nothing. It calls a given callable at these moments::

    operation       START ──────────── END        F, B, I, W, RECOMPUTE, STEP
    send            ISSUE                          directly after the previous operation
    receive         ISSUE (posted) ─── ARRIVAL     the message is in the receiver's buffers
    reduction       ISSUE

The calls for one device are in the order in which it issues its actions. An operation starts when all its inputs have
arrived.
"""

from collections.abc import Callable
from enum import StrEnum

from ..actions import Action


class CallMoment(StrEnum):
    """The moment of a call."""

    START = "start"
    END = "end"
    ISSUE = "issue"
    ARRIVAL = "arrival"


ActionCallback = Callable[[CallMoment, int, Action, float], None]
"""(moment, device, action, seconds since the step's start); the action of an ARRIVAL is the receive."""
