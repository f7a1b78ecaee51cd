"""Matches each send of the lowered lists with its receive, and finds both positions in the compute queues.

The order of sends and receives is decided in `lowering`. Here each send has the last compute item issued before it, and
each receive the next compute item after it::

    issued         1RECV_F0<0   1F0   1SEND_F0>2   1RECV_B0<2   1B0
    compute item                 0                                1
    message 0F0>1  posted=0, reader=0
    message 1F0>2                     issued=0
    message 2B0>1                                  posted=1, reader=1
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ..actions import Action, Kind
from ..errors import RequestError
from ..plan.items import Message

if TYPE_CHECKING:
    from ..plan.plan import Plan

_F, _B, _I = Kind.F, Kind.B, Kind.I
_SEND_F, _SEND_B, _RECV_F = Kind.SEND_F, Kind.SEND_B, Kind.RECV_F

Pair = tuple[int, int]
Posted = dict[Pair, list[tuple[Action, int]]]
"""Per ordered pair of devices the sends, or the receives, each with the number of compute items issued before it."""
Positions = dict[tuple[int, int | None], int]
"""Positions of F, or of B and I, by stage and microbatch."""


def computed_at(actions: Iterable[Action]) -> tuple[Positions, Positions]:
    """Positions of F, and of B or I: the actions that read messages and compute them."""
    forward: Positions = {}
    backward: Positions = {}
    for position, action in enumerate(actions):
        kind = action.kind
        if kind is _F:
            forward[action.stage, action.microbatch] = position
        elif kind is _B or kind is _I:
            backward[action.stage, action.microbatch] = position
    return forward, backward


def sending_pairs(plan: Plan) -> tuple[Pair, ...]:
    """The ordered pairs of devices between which a step of a plan sends: activations, gradients, and tied weights.

    A tied weight's gradients go to the device of its first stage, and their sum goes back.
    """
    where = plan.placement
    found = {(where[edge.src], where[edge.dst]) for edge in plan.edges}
    found |= {(where[edge.dst], where[edge.src]) for edge in plan.edges if edge.gradient_bytes > 0}
    for weight in plan.tied:
        first = where[weight.stages[0]]
        found |= {pair for stage in weight.stages for pair in ((first, where[stage]), (where[stage], first))}
    return tuple(sorted((a, b) for a, b in found if a != b))


def match_messages(
    plan: Plan, sent: Posted, received: Posted, compute: Iterable[Iterable[Action]]
) -> dict[Pair, list[Message]]:
    """Match every send with its receive: the messages of every ordered pair of devices, in the order of both ends.

    Args:
        plan: its placement and edges.
        sent, received: the actions that devices issue; a send's number is that of the compute item before it.
        compute: per device its compute queue.

    Raises:
        RequestError: a send or receive has no counterpart; the two ends of a queue differ in order; a message is sent
            before it is computed, received after its reader, sent twice, or not sent.
    """
    ends = {device for pair in (*sent, *received) for device in pair}
    positions = {device: computed_at(actions) for device, actions in enumerate(compute) if device in ends}
    queues = {
        pair: _match_queue(plan, pair, sent.get(pair, []), received.get(pair, []), positions)
        for pair in (*sent, *(pair for pair in received if pair not in sent))
    }
    _check_complete(plan, queues)
    return queues


def peer_device(plan: Plan, device: int, action: Action) -> int:
    """Device at the other end of a communication that ``device`` issues."""
    placement = plan.placement
    stages = len(placement)
    if action.peer is None or not (0 <= action.stage < stages and 0 <= action.peer < stages):
        raise RequestError(
            f"{action} on device {device} names no pair of stages: a plan of {stages} has 0 to {stages - 1}"
        )
    if placement[action.stage] != device:
        raise RequestError(
            f"{action} is issued by device {device}, and stage {action.stage} is on device "
            f"{placement[action.stage]}: move it there"
        )
    if placement[action.peer] == device:
        raise RequestError(f"{action} stays on device {device}: stages of one device do not communicate; remove it")
    return placement[action.peer]


def _match_queue(
    plan: Plan,
    pair: Pair,
    sent: list[tuple[Action, int]],
    received: list[tuple[Action, int]],
    positions: Mapping[int, tuple[Positions, Positions]],
) -> list[Message]:
    src, dst = pair
    sizes = {(edge.src, edge.dst): edge for edge in plan.edges}
    messages: list[Message] = []
    for (send, issued), (receive, posted) in zip(sent, received, strict=False):
        is_forward = send.kind is _SEND_F
        stage, peer, microbatch = send.stage, send.peer, send.microbatch
        if (
            receive.stage != peer
            or receive.peer != stage
            or receive.microbatch != microbatch
            or (receive.kind is _RECV_F) != is_forward
        ):
            raise RequestError(
                f"message {len(messages)} from device {src} to {dst} is {send} at the sender and {receive} at the "
                "receiver: both ends have one order; move the receive"
            )
        edge = sizes.get((stage, peer) if is_forward else (peer, stage))
        if edge is None or not (is_forward or edge.gradient_bytes > 0):
            raise RequestError(f"{send} has no edge in the plan: remove it and its receive")
        ready = positions[src][0 if is_forward else 1].get((stage, microbatch))
        if ready is None or ready > issued:
            raise RequestError(
                f"{send} is before the action that computes its tensors: move it after {_compute_of(send)}"
            )
        reader = positions[dst][0 if is_forward else 1].get((peer, microbatch))
        if reader is None or reader < posted:
            raise RequestError(f"{receive} is after the action that reads it: move it before {_compute_of(receive)}")
        size = edge.bytes if is_forward else edge.gradient_bytes
        messages.append(Message(send, receive, src, dst, size, issued, posted, reader))
    if len(sent) != len(received):
        unmatched = (sent if len(sent) > len(received) else received)[len(messages)][0]
        raise RequestError(
            f"{unmatched} has no counterpart: device {src} sends {len(sent)} messages to device {dst}, which receives "
            f"{len(received)}; add {unmatched.counterpart}, or remove it"
        )
    return messages


def _compute_of(action: Action) -> str:
    kind = "F" if action.kind in (_SEND_F, _RECV_F) else "backward"
    return f"stage {action.stage}'s {kind} of microbatch {action.microbatch}"


def _check_complete(plan: Plan, queues: dict[Pair, list[Message]]) -> None:
    """Every edge between devices carries each microbatch once."""
    where = plan.placement
    expected = sum(
        (1 + (edge.gradient_bytes > 0)) * plan.microbatches for edge in plan.edges if where[edge.src] != where[edge.dst]
    )
    found = [message.send for queue in queues.values() for message in queue]
    if len(found) == expected:
        seen = {(send.stage, send.peer, send.microbatch) for send in found}
        if len(seen) == expected:
            return
    _explain_incomplete(plan, found)


def _explain_incomplete(plan: Plan, found: list[Action]) -> None:
    left = set(found)
    if len(left) < len(found):
        twice = next(send for i, send in enumerate(found) if send in found[:i])
        raise RequestError(f"{twice} is sent twice: each message is sent once; remove one and its receive")
    for edge in plan.edges:
        if plan.placement[edge.src] == plan.placement[edge.dst]:
            continue
        for microbatch in range(plan.microbatches):
            wanted = [Action(edge.src, _SEND_F, microbatch, edge.dst)]
            if edge.gradient_bytes > 0:
                wanted.append(Action(edge.dst, _SEND_B, microbatch, edge.src))
            for send in wanted:
                if send not in left:
                    raise RequestError(f"{send} is missing: stage {send.peer} reads it; add it and {send.counterpart}")
                left.discard(send)
    raise RequestError(f"{min(map(str, left))} sends a microbatch that the plan does not have: remove it")
