"""Which sends of a device are over by the time that a receive is: what tells that a message need not be kept."""

from collections.abc import Sequence

from ...core.actions import COMPUTE_KINDS, RECV_KINDS, Action, Kind
from ...core.plan.plan import Plan
from .mail import Message


def finished_sends(plan: Plan, lowered: Sequence[Sequence[Action]], device: int) -> dict[Action, tuple[Message, ...]]:
    """For receives of one device: which of its own sends are over once the receive is.

    A send from this device is over when the peer has run the action that reads it. The first message that the peer
    sends back afterwards proves it, so that nobody need ask: gloo's handles can only be waited for.
    """
    found: dict[Action, tuple[Message, ...]] = {}
    placement = plan.placement
    for peer, actions in enumerate(lowered):
        if peer == device:
            continue
        read: list[Message] = []
        arrived: dict[tuple[int, int | None, bool], list[Message]] = {}
        for action in actions:
            stage, kind, microbatch, other = action.stage, action.kind, action.microbatch, action.peer
            if other is not None and microbatch is not None and placement[other] == device:
                if kind in RECV_KINDS:
                    reader = stage, microbatch, kind is Kind.RECV_F
                    arrived.setdefault(reader, []).append((other, stage, microbatch))
                elif read:
                    found[action.counterpart] = tuple(read)
                    read = []
            elif kind in COMPUTE_KINDS and kind is not Kind.W:
                read += arrived.pop((stage, microbatch, kind is Kind.F), [])
    return found
