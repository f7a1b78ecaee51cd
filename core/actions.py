"""Actions: the words in which schedules, plans, runtimes and traces speak.

An action is written ``<stage><kind><microbatch>``, e.g. ``2F0``: the grammar of
``torch.distributed.pipelining``'s schedule files. A lowered communication also carries the stage at
its other end: ``0SEND_F3>2`` sends stage 0's output of microbatch 3 to stage 2, where
``2RECV_F3<0`` receives it.
"""

import re
from enum import StrEnum

from attrs import frozen

from .errors import RequestError


class Kind(StrEnum):
    """What an action does (the table of the design, section 3)."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the field's name for the input-gradient half of a backward
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    RECOMPUTE = "RECOMPUTE"
    OFFLOAD = "OFFLOAD"
    RELOAD = "RELOAD"
    REDUCE_GRAD = "REDUCE_GRAD"
    REDUCE_TIED = "REDUCE_TIED"
    SYNC = "SYNC"
    STEP = "STEP"


COMPUTE_KINDS = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
"""What a compute order holds."""
WORK_KINDS = COMPUTE_KINDS | {Kind.RECOMPUTE}
"""What a lowered plan computes for a microbatch."""
SEND_KINDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECV_KINDS = frozenset({Kind.RECV_F, Kind.RECV_B})
COMM_KINDS = SEND_KINDS | RECV_KINDS
STEP_KINDS = frozenset({Kind.REDUCE_GRAD, Kind.REDUCE_TIED, Kind.SYNC, Kind.STEP})
"""Kinds that belong to a whole step and take no microbatch."""


@frozen(order=False)
class Action:
    """One thing that a device does.

    Args:
        stage: the stage it works on; for a send the sender's, for a receive the receiver's.
        kind: what it does.
        microbatch: which microbatch, from 0; None for kinds that belong to a whole step.
        peer: the stage at the other end of a send or receive; None for every other kind.
    """

    stage: int
    kind: Kind
    microbatch: int | None = None
    peer: int | None = None

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind.value}"
        if self.microbatch is not None:
            text += str(self.microbatch)
        if self.peer is not None:
            text += (">" if self.kind in SEND_KINDS else "<") + str(self.peer)
        return text

    @property
    def counterpart(self) -> "Action":
        """The receive of this send, or the send of this receive."""
        if self.peer is None:
            raise ValueError(f"{self} is not a communication and has no counterpart")
        return Action(self.peer, _COUNTERPART[self.kind], self.microbatch, self.stage)


_COUNTERPART = {
    Kind.SEND_F: Kind.RECV_F,
    Kind.RECV_F: Kind.SEND_F,
    Kind.SEND_B: Kind.RECV_B,
    Kind.RECV_B: Kind.SEND_B,
}

_PATTERN = re.compile(
    r"(?P<stage>\d+)(?P<kind>"
    + "|".join(sorted((k.value for k in Kind), key=len, reverse=True))
    + r")(?P<microbatch>\d+)?(?:(?P<arrow>[<>])(?P<peer>\d+))?"
)


def parse_action(text: str) -> Action:
    """Read one action.

    Raises:
        RequestError: the text is not an action, whole (trailing text is refused).
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise RequestError(
            f"'{text}' is not an action: write <stage><kind><microbatch>, such as 2F0, with kind one of "
            + ", ".join(k.value for k in Kind)
        )
    kind = Kind(match["kind"])
    microbatch = None if match["microbatch"] is None else int(match["microbatch"])
    if (microbatch is None) != (kind in STEP_KINDS):
        rule = "takes no microbatch" if kind in STEP_KINDS else "needs a microbatch"
        raise RequestError(f"'{text}' is not an action: {kind.value} {rule}")
    if match["arrow"] is not None:
        wanted = ">" if kind in SEND_KINDS else "<" if kind in RECV_KINDS else None
        if match["arrow"] != wanted:
            raise RequestError(
                f"'{text}' is not an action: a peer stage stands behind '>' in a send, behind '<' in a receive, "
                "and nowhere else"
            )
    peer = None if match["peer"] is None else int(match["peer"])
    return Action(int(match["stage"]), kind, microbatch, peer)
