"""Backpressure: how many microbatches a stage may run ahead of the transfers of its outputs.

A sent message occupies memory until it has arrived, and the sender learns of the arrival only by waiting for it. In
training, saved tensors and the gradients that come back limit how far a stage runs ahead. In a forward-only plan no
message comes back: the first stage could finish the batch while the messages of all microbatches are in memory. So F of
microbatch m waits until the message of microbatch m - limit has been sent. This takes no time while readers keep up.

A reader d stages later is d - 1 microbatches late anyway, so the limit grows with d. It is doubled while it deadlocks.
"""

from collections.abc import Sequence

from ..actions import Action
from ..lowering.queues import queues_of
from ..plan.plan import Plan
from ..timing.engine import AheadLimit
from ..timing.orders import run_alone

_AHEAD = 2
"""Messages to the next stage that may be in memory, including the one being computed."""


def choose_ahead_limit(plan: Plan, lowered: Sequence[Sequence[Action]]) -> AheadLimit:
    """How far stages may run ahead of their readers in a forward-only plan: small, and without a deadlock."""
    queues = queues_of(plan, lowered)
    ahead = _AHEAD
    while ahead < plan.microbatches:
        if run_alone(plan, queues, limit=_ahead_by(ahead))[1]:
            return _ahead_by(ahead)
        ahead *= 2
    return _ahead_by(plan.microbatches)


def _ahead_by(ahead: int) -> AheadLimit:
    return lambda stage, reader: ahead + reader - stage - 1
