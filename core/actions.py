"""Actions: the vocabulary that schedules, plans, runtimes and traces share.

An action is written ``<stage><kind><microbatch>``, e.g. ``2F0``: the grammar of ``torch.distributed.pipelining``'s
schedule files. A lowered send or receive also names its peer stage: ``0SEND_F3>2`` sends stage 0's output of
microbatch 3 to stage 2, where ``2RECV_F3<0`` receives it.
"""

import re
from typing import ClassVar

from attrs import frozen

from .errors import RequestError


class Kind(str):
    """What an action does: its letters in the grammar.

    ``declare_kind`` adds a kind. There is one object for each kind, so kinds are compared by ``is``: ``Kind("F")`` is
    ``Kind.F``. Undeclared letters raise ValueError.

    Attributes:
        value: the letters.
        whole_step: whether its actions belong to a whole step and take no microbatch; None for a kind with both.
    """

    __slots__ = ("value", "whole_step")
    value: str
    whole_step: bool | None

    F: ClassVar["Kind"]
    B: ClassVar["Kind"]
    I: ClassVar["Kind"]  # noqa: E741 - the field's name for the input-gradient half of a backward
    W: ClassVar["Kind"]
    SEND_F: ClassVar["Kind"]
    RECV_F: ClassVar["Kind"]
    SEND_B: ClassVar["Kind"]
    RECV_B: ClassVar["Kind"]
    RECOMPUTE: ClassVar["Kind"]
    OFFLOAD: ClassVar["Kind"]
    RELOAD: ClassVar["Kind"]
    SCATTER_GRAD: ClassVar["Kind"]
    REDUCE_GRAD: ClassVar["Kind"]
    REDUCE_TIED: ClassVar["Kind"]
    SYNC: ClassVar["Kind"]
    STEP: ClassVar["Kind"]
    UNSHARD: ClassVar["Kind"]
    RESHARD: ClassVar["Kind"]

    def __new__(cls, letters: str) -> "Kind":
        """The kind of these letters."""
        if letters not in _KNOWN:
            raise ValueError(f"'{letters}' is not a valid Kind: give one of {', '.join(_KNOWN)}")
        return _KNOWN[letters]

    def __reduce__(self) -> tuple[type["Kind"], tuple[str]]:
        return Kind, (self.value,)


_KNOWN: dict[str, Kind] = {}


def known_kinds() -> tuple[Kind, ...]:
    """All kinds, in the order in which they were declared."""
    return tuple(_KNOWN.values())


def declare_kind(letters: str, *, whole_step: bool | None = False) -> Kind:
    """Add a kind to the grammar, or return the one that has these letters.

    Args:
        letters: capitals and underscores.
        whole_step: whether its actions belong to a whole step and take no microbatch; None for a kind with both.

    Raises:
        ValueError: the letters contain other characters, or the kind is declared with another ``whole_step``.
    """
    if re.fullmatch("[A-Z_]+", letters) is None:
        raise ValueError(f"a kind cannot be called '{letters}': use capitals and underscores")
    kind = _KNOWN.setdefault(letters, str.__new__(Kind, letters))
    if not hasattr(kind, "value"):
        kind.value, kind.whole_step = letters, whole_step
    elif kind.whole_step != whole_step:
        raise ValueError(f"kind {letters} is declared already, with whole_step={kind.whole_step}: use other letters")
    return kind


for _letters in (
    "F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "RECOMPUTE", "OFFLOAD", "RELOAD", "SCATTER_GRAD",
):  # fmt: skip
    setattr(Kind, _letters, declare_kind(_letters))
for _letters in ("REDUCE_GRAD", "REDUCE_TIED", "SYNC", "STEP"):
    setattr(Kind, _letters, declare_kind(_letters, whole_step=True))
# At the end of a step it has no number. Within one, it has the number of the run for which it gathers parameters.
Kind.UNSHARD = declare_kind("UNSHARD", whole_step=None)
Kind.RESHARD = declare_kind("RESHARD")

COMPUTE_KINDS = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
"""The kinds in a compute order."""
BACKWARD_KINDS = frozenset({Kind.B, Kind.I})
"""The kinds that begin the backward of a microbatch: they read its saved tensors and the gradient of its output."""
WORK_KINDS = COMPUTE_KINDS | {Kind.RECOMPUTE}
"""The kinds that compute for a microbatch in a lowered plan."""
LAST_BACKWARD = (Kind.B, Kind.W)
"""The kinds after which a microbatch's gradients of a stage's parameters are complete."""
AT_START = -1
"""The position in a compute order of what precedes its first action."""
SEND_KINDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECV_KINDS = frozenset({Kind.RECV_F, Kind.RECV_B})
COMM_KINDS = SEND_KINDS | RECV_KINDS


@frozen(order=False)
class Action:
    """One piece of a device's work.

    Args:
        stage: the stage it works on; for a send the sender's, for a receive the receiver's.
        microbatch: which microbatch, from 0; None for kinds that belong to a whole step. For UNSHARD and RESHARD within
            a step, which run of the stage (``plan/memory_policy``).
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

_NUMBER = "[0-9]{1,7}"  # numbers of stages and microbatches: a longer one is a mistake
_PATTERN = re.compile(
    f"(?P<stage>{_NUMBER})(?P<kind>[A-Z_]+)(?P<microbatch>{_NUMBER})?(?:(?P<arrow>[<>])(?P<peer>{_NUMBER}))?"
)


def parse_action(text: str) -> Action:
    """Read one action.

    Raises:
        RequestError: the text is not an action, or has further text after it.
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None or match["kind"] not in _KNOWN:
        raise RequestError(
            f"'{text[:80]}' is not an action: write <stage><kind><microbatch>, such as 2F0, with numbers of at most 7 "
            f"digits and kind one of {', '.join(_KNOWN)}"
        )
    kind = _KNOWN[match["kind"]]
    microbatch = None if match["microbatch"] is None else int(match["microbatch"])
    if kind.whole_step is not None and (microbatch is None) != kind.whole_step:
        rule = "takes no microbatch" if kind.whole_step else "needs a microbatch"
        raise RequestError(f"'{text}' is not an action: {kind.value} {rule}")
    if match["arrow"] is not None:
        wanted = ">" if kind in SEND_KINDS else "<" if kind in RECV_KINDS else None
        if match["arrow"] != wanted:
            raise RequestError(
                f"'{text}' is not an action: a send names its peer stage after '>', a receive after '<', and no other "
                "kind names one"
            )
    peer = None if match["peer"] is None else int(match["peer"])
    return Action(int(match["stage"]), kind, microbatch, peer)
