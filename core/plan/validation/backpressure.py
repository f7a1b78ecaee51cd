"""How far a stage may run ahead of the transfers of what it makes.

A message that was sent stays in memory until it has arrived, and a sender learns that only by waiting for it. In
training the gradients that come back tell, and saved tensors bound how far anybody runs ahead. Where there are forwards
alone nothing comes back: a first stage would be through with a batch while the messages of all its microbatches lie
there. So its F of microbatch m waits until the message of microbatch m - room has left, which costs no time as long as
readers keep up.

A reader that is d stages on is d - 1 microbatches behind by itself. More is added until nobody waits in a circle.
"""

from collections.abc import Sequence

from ...actions import Action
from ...errors import RequestError
from ..plan import Plan
from ..queues import queues_of
from .progress import Room, run_order, waits_of

_AHEAD = 2
"""Messages to the next stage that may lie there, the one in the making included."""


def room_for(plan: Plan, lowered: Sequence[Sequence[Action]]) -> Room:
    """How far stages may run ahead of their readers in a plan that is forward only; small, and no deadlock by it.

    Args:
        plan: sound.
        lowered: what its devices issue.
    """
    queues = queues_of(plan, lowered)
    ahead = _AHEAD
    while ahead < plan.microbatches:
        found = _ahead_by(ahead)
        try:
            run_order(waits_of(plan, queues, found))
        except RequestError:
            ahead *= 2
        else:
            return found
    return _ahead_by(plan.microbatches)


def _ahead_by(ahead: int) -> Room:
    return lambda stage, reader: ahead + reader - stage - 1
