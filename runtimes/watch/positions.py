"""Detects hangs from the positions (the current action, and the ranks it waits for) that all ranks publish.

    rank 2 waits for rank 1, which waits for rank 0, which computes      rank 0 decides: no progress there is a hang
    rank 0 waits for rank 1, which waits for rank 0                      they run different methods: a hang
    rank 1 waits for rank 0, which has left                              a hang

A rank hangs if it has waited for the limit, and no rank that it waits for, directly or through others, has made
progress for that time. A long action, a long compilation with progress and a pause of all ranks are no hangs.

Hangs between devices that are threads of one process are found, and raised, by the thread that waits for them.
"""

import atexit
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

from attrs import evolve, frozen

from ...core.errors import RequestError, WorkerError
from ...core.plain_data import decode, encode, exchanged
from ...core.wording import first_of
from .activity import Activity, QuietTime
from .process import end_process

LEFT_S = 10.0
"""The most seconds to wait for a rank that has closed its pipeline: what it sent before may still arrive."""
_ALIVE_S = 1.0
"""Seconds without a sign of life below which a text does not mention it."""
_LISTED = 6
"""Ranks that a reason describes."""


@exchanged
@frozen
class Position:
    """Where a rank is.

    Args:
        on: the ranks that it waits for.
        quiet_s: seconds since its last progress, by its own clock.
        line: the user's line that it executes; empty if unknown.
        left: why it closed its pipeline; None while it is open.
        stops: whether it knows the reason for which all ranks stop.
        process: its host, and the number of its process there.
        silent_s: seconds since its last sign of life, by the reader's clock.
        number: different in each position that a rank publishes.
    """

    text: str
    stages: tuple[int, ...] = ()
    on: tuple[int, ...] = ()
    quiet_s: float = 0.0
    line: str = ""
    left: str | None = None
    stops: bool = False
    process: tuple[str, int] = ("", 0)
    silent_s: float = 0.0
    number: int = 0

    @classmethod
    def of(cls, activity: Activity, quiet_s: float, **others: Any) -> "Position":
        """The position of a device by its activity.

        Args:
            quiet_s: seconds since its last progress.
            others: arguments of the class.
        """
        line = activity.line() if quiet_s >= 1 and not activity.on else ""
        return cls(activity.text(), activity.stages, activity.on, quiet_s, line, **others)

    @property
    def no_progress_s(self) -> float:
        """Seconds without progress."""
        return self.quiet_s + self.silent_s

    @property
    def seems_stopped(self) -> bool:
        """Whether it gives no sign of life: its process is stopped or lost, or holds the interpreter's lock."""
        return self.left is None and self.silent_s >= _ALIVE_S and self.silent_s >= self.quiet_s

    def document(self, number: int) -> bytes:
        """As plain data, with a number."""
        return encode(evolve(self, number=number))

    @classmethod
    def of_document(cls, document: bytes) -> "Position":
        """A position from its document; one without content if it cannot be read."""
        try:
            found = decode(document)
        except ValueError:
            return UNKNOWN
        return found if isinstance(found, cls) else UNKNOWN


UNKNOWN = Position("at an unknown place")


def hangs(rank: int, positions: Mapping[int, Position], timeout_s: float) -> bool:
    """Whether a rank hangs: see the module's rule."""
    own = positions[rank]
    if not own.on or own.quiet_s < min(timeout_s, LEFT_S):
        return False  # before a look at the others: if all wait for all, it takes long
    found = {other: positions.get(other, UNKNOWN) for other in awaited(rank, positions)}
    left = {other for other, position in found.items() if position.left is not None}
    if not left.isdisjoint(own.on):
        return True
    silent = all(position.no_progress_s >= timeout_s for other, position in found.items() if other not in left)
    return silent and own.quiet_s >= timeout_s


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
        unit: what has the numbers: ranks, or devices of one process.
    """
    own, chain = positions[rank], awaited(rank, positions)
    found = {other: positions.get(other, UNKNOWN) for other in chain}
    late = [other for other, position in found.items() if not position.on or position.seems_stopped]
    late = late or [other for other in chain if found[other].left is not None] or chain
    described = [f"{unit} {other} {_state(found[other], unit)}" for other in late[:_LISTED]]
    if len(late) > _LISTED:
        described.append(f"{len(late) - _LISTED} more {unit}s made no progress")
    through = "" if set(own.on) & set(late) else f", which waits for {named(late, unit, _LISTED)}"
    waits = f"{unit} {rank} waited {own.quiet_s:.3g} s for {named(own.on, unit, _LISTED)} {own.text}{through}"
    fix = f"see what it does there, or raise timeout_s, which is {timeout_s:g} s"
    if any(found[other].left is not None or (found[other].on and not found[other].seems_stopped) for other in late):
        fix = f"every {unit} of a pipeline must take the same batches and call the same methods in the same order"
    return f"{waits}; {'; '.join(described)}: {fix}"


def _state(position: Position, unit: str) -> str:
    """What a rank does, after its name."""
    line = f", line {position.line}" if position.line else ""
    if position.left is not None:
        return f"has closed its pipeline{position.left}"
    if position.seems_stopped:
        return f"gave no sign of life for {position.silent_s:.3g} s and was last seen {position.text}{line}"
    if position.on:
        return f"has waited {position.quiet_s:.3g} s for {named(position.on, unit, _LISTED)} {position.text}"
    return f"has been {position.text} for {position.quiet_s:.3g} s{line}"


def named(ranks: Sequence[int], unit: str = "rank", listed: int = 1_000) -> str:
    """Ranks in words: ``rank 1``, ``ranks 1, 2``."""
    return f"{unit}{'s' if len(ranks) > 1 else ''} {first_of([str(rank) for rank in ranks], listed)}"


def table(positions: Mapping[int, Position], ranks: Iterable[int], unit: str = "rank") -> str:
    """Where every rank is, a line for each."""
    found = {rank: positions.get(rank, UNKNOWN) for rank in ranks}
    stages = {rank: f" ({named(each.stages, 'stage')})" if each.stages else "" for rank, each in found.items()}
    return "\n".join(f"  {unit} {rank}{stages[rank]} {_state(each, unit)}" for rank, each in found.items())


class ThreadHangs:
    """Waits for devices, and finds those that hang.

    Args:
        activities: device → what it does.

    Attributes:
        hang: the error of a hang, whose thread still runs; None for none.
    """

    def __init__(self, activities: Mapping[int, Activity], timeout_s: float) -> None:
        self._activities, self._timeout_s = activities, timeout_s
        self._poll_s = min(0.5, timeout_s / 8)
        self._quiet = {device: QuietTime(4 * self._poll_s) for device in activities}
        self.hang: WorkerError | None = None

    def where(self) -> str:
        """Where every device is, a line for each. Times are those since the devices were last looked at."""
        found = {device: self._position(device, quiet, False) for device, quiet in self._quiet.items()}
        return f"devices of this process\n{table(found, found, 'device')}"

    def wait(self, running: Mapping[int, "Future[Any]"]) -> WorkerError | None:
        """Wait until all devices are done.

        Args:
            running: device → its work, which raises nothing.

        Returns:
            The error if a device hangs; the thread of another device then still runs.
        """
        _, undone = wait(running.values(), self._poll_s)
        quiet = self._quiet
        while undone:
            _, undone = wait(running.values(), self._poll_s)
            found = {device: self._position(device, quiet[device], running[device].done()) for device in running}
            late = next((device for device in found if hangs(device, found, self._timeout_s)), None)
            if undone and late is not None:
                self.hang = WorkerError(reason_of_hang(late, found, self._timeout_s, "device"))
                atexit.register(end_process)
                return self.hang
        return None

    def _position(self, device: int, quiet: QuietTime, done: bool) -> Position:
        activity = self._activities[device]
        if done:
            return Position(f"done with {activity.method}", activity.stages, quiet_s=self._timeout_s)
        return Position.of(activity, quiet.update((activity.count, activity.on)))


TIMEOUT_S = 300.0
"""The limit by default: one rank may still read its model while another one has captured it."""
VARIABLE = "PANPIPE_TIMEOUT_S"
"""The environment variable that replaces the default."""


def timeout_of(given: float | None) -> float:
    """The limit in seconds: the given one, the variable's, or `TIMEOUT_S`.

    Raises:
        RequestError: it is not a finite number above 0.
    """
    text = os.environ.get(VARIABLE)
    if given is None and text is None:
        return TIMEOUT_S
    seconds = math.nan
    with suppress(OverflowError, ValueError):
        if given is None:
            seconds = float(text or math.nan)
        elif isinstance(given, int | float) and not isinstance(given, bool):
            seconds = float(given)
    if not 0 < seconds < math.inf:
        what = f"{VARIABLE} is '{text}'" if given is None else f"timeout_s is {given!r}"
        raise RequestError(
            f"{what}: give a finite number of seconds above 0, after which ranks stop waiting for each other"
        )
    return seconds
