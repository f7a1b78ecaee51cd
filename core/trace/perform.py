"""What a simulated step tells of its actions as they happen, so that somebody can perform them.

The simulator knows when things happen, and not what they do. Handed a callable, it calls it at every moment at which an
action does something::

    operation       START ──────────── END        F, B, I, W, RECOMPUTE, STEP
    send            ISSUE                          directly behind the operation in front of it
    receive         ISSUE (posted) ─── ARRIVAL     the message has left its sender and lies in the receiver's buffers
    reduction       ISSUE

One device's actions come in the order in which it issues them. An operation starts when all it reads has arrived.
"""

from collections.abc import Callable
from enum import StrEnum

from ..actions import Action


class Moment(StrEnum):
    """When an action does something."""

    START = "start"
    END = "end"
    ISSUE = "issue"
    ARRIVAL = "arrival"


Perform = Callable[[Moment, int, Action, float], None]
"""Told the moment, the device, its action (of an arrival the receive), and the seconds since the step's start."""
