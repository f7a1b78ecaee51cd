"""Detects hangs from the positions (the current action, and the ranks it waits for) that all ranks publish.

    rank 2 waits for rank 1, which waits for rank 0, which computes      rank 0 decides: no progress there is a hang
    rank 0 waits for rank 1, which waits for rank 0                      they run different methods: a hang
    rank 1 waits for rank 0, which has left                              a hang

A rank hangs if it has waited for the limit, and no rank that it waits for, directly or through others, has made
progress for that time. A long action, a long compilation with progress and a pause of all ranks are no hangs.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import asdict, frozen

from ...core.wording import first_of

LEFT_S = 10.0
"""The most seconds to wait for a rank that has closed its pipeline: what it sent before may still arrive."""
_ALIVE_S = 1.0
"""Seconds without a sign of life below which a text does not mention it."""
_LISTED = 6
"""Ranks that a reason describes."""


@frozen
class Position:
    """Where a rank is.

    Args:
        text: the method and the action.
        stages: of the rank.
        on: the ranks that it waits for.
        quiet_s: seconds since its last progress, by its own clock.
        line: the user's line that it executes; empty if unknown.
        left: why it closed its pipeline; None while it is open.
        silent_s: seconds since its last sign of life, by the reader's clock.
    """

    text: str
    stages: tuple[int, ...] = ()
    on: tuple[int, ...] = ()
    quiet_s: float = 0.0
    line: str = ""
    left: str | None = None
    silent_s: float = 0.0

    @property
    def no_progress_s(self) -> float:
        """Seconds without progress."""
        return self.quiet_s + self.silent_s

    @property
    def seems_stopped(self) -> bool:
        """Whether it gives no sign of life: its process is stopped or lost, or holds the interpreter's lock."""
        return self.silent_s >= _ALIVE_S and self.silent_s >= self.quiet_s

    def document(self, beat: int) -> str:
        """As JSON, with a number that is different in each document of a rank."""
        return json.dumps({**asdict(self), "beat": beat})

    @classmethod
    def of_document(cls, document: bytes) -> "Position":
        """A position from JSON; one without content if it cannot be read."""
        try:
            given = json.loads(document)
            return cls(
                text=str(given["text"]),
                stages=_numbers(given["stages"]),
                on=_numbers(given["on"]),
                quiet_s=float(given["quiet_s"]),
                line=str(given["line"]),
                left=None if given["left"] is None else str(given["left"]),
            )
        except (ValueError, TypeError, KeyError, RecursionError):
            return cls("at an unknown place")


UNKNOWN = Position("not arrived yet")
"""The position of a rank that has published none."""


def _numbers(given: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(number) for number in given)


def hangs(rank: int, positions: Mapping[int, Position], timeout_s: float) -> bool:
    """Whether a rank hangs: see the module's rule.

    Args:
        rank: the rank.
        positions: of all ranks.
        timeout_s: the limit.
    """
    own = positions[rank]
    if not own.on:
        return False
    if any(_left(positions, other) for other in own.on) and own.quiet_s >= min(timeout_s, LEFT_S):
        return True
    if own.quiet_s < timeout_s:
        return False
    others = awaited(rank, positions)
    return all(positions.get(other, UNKNOWN).no_progress_s >= timeout_s or _left(positions, other) for other in others)


def _left(positions: Mapping[int, Position], rank: int) -> bool:
    return positions.get(rank, UNKNOWN).left is not None


def awaited(rank: int, positions: Mapping[int, Position]) -> list[int]:
    """The other ranks that a rank waits for, directly or through others, nearest first."""
    found, at = [rank], 0
    while at < len(found):
        position = positions.get(found[at], UNKNOWN)
        at += 1
        if position.left is None:
            found += [other for other in position.on if other not in found]
    return found[1:]


def reason_of_hang(rank: int, positions: Mapping[int, Position], timeout_s: float, unit: str = "rank") -> str:
    """Who waits for whom in which action, and what the late ranks did last, in a line.

    Args:
        rank: one that hangs.
        positions: of all ranks.
        timeout_s: the limit.
        unit: what has the numbers: ranks, or devices of one process.
    """
    own, chain = positions[rank], awaited(rank, positions)
    late = [other for other in chain if not positions.get(other, UNKNOWN).on or _silent(positions, other)]
    late = late or [other for other in chain if _left(positions, other)] or chain
    described = [_state(other, positions.get(other, UNKNOWN), unit) for other in late[:_LISTED]]
    if len(late) > _LISTED:
        described.append(f"{len(late) - _LISTED} more {unit}s made no progress")
    through = "" if set(own.on) & set(late) else f", which waits for {_named(late, unit)}"
    waits = f"{unit} {rank} waited {own.quiet_s:.3g} s for {_named(own.on, unit)} {own.text}{through}"
    return f"{waits}; {'; '.join(described)}: {_fix(late, positions, timeout_s, unit)}"


def _silent(positions: Mapping[int, Position], rank: int) -> bool:
    return positions.get(rank, UNKNOWN).seems_stopped


def _fix(late: Sequence[int], positions: Mapping[int, Position], timeout_s: float, unit: str) -> str:
    found = [positions.get(rank, UNKNOWN) for rank in late]
    if any(position.left is not None or (position.on and not position.seems_stopped) for position in found):
        return f"every {unit} of a pipeline must take the same batches and call the same methods in the same order"
    return f"see what it does there, or raise timeout_s, which is {timeout_s:g} s"


def _state(rank: int, position: Position, unit: str) -> str:
    who = f"{unit} {rank}"
    if position.text == UNKNOWN.text:
        return f"{who} did not arrive"
    if position.left is not None:
        return f"{who} has closed its pipeline{position.left}"
    line = f", line {position.line}" if position.line else ""
    if position.seems_stopped:
        return f"{who} gave no sign of life for {position.silent_s:.3g} s and was last seen {position.text}{line}"
    if position.on:
        return f"{who} has waited {position.quiet_s:.3g} s for {_named(position.on, unit)} {position.text}"
    return f"{who} has been {position.text} for {position.quiet_s:.3g} s{line}"


def _named(ranks: Sequence[int], unit: str) -> str:
    return f"{unit}{'s' if len(ranks) > 1 else ''} {first_of([str(rank) for rank in ranks], _LISTED)}"


def table(positions: Mapping[int, Position], ranks: Iterable[int], unit: str = "rank") -> str:
    """Where every rank is, a line for each."""
    return "\n".join(f"  {unit} {rank}{_condition(positions.get(rank, UNKNOWN), unit)}" for rank in ranks)


def _condition(position: Position, unit: str) -> str:
    stages = f" (stage{'s' if len(position.stages) > 1 else ''} {', '.join(map(str, position.stages))})"
    who = f"{stages if position.stages else ''}: "
    if position.left is not None:
        return f"{who}closed its pipeline{position.left}"
    waits = f", waits for {_named(position.on, unit)}" if position.on else ""
    line = f", line {position.line}" if position.line else ""
    silent = f", no sign of life for {position.silent_s:.1f} s" if position.seems_stopped else ""
    return f"{who}{position.text} for {position.quiet_s:.1f} s{waits}{line}{silent}"
