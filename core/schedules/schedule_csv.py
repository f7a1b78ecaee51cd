"""Reading and writing schedule files of ``torch.distributed.pipelining`` (CSV).

Excel dialect, no header, row i is device i. A file is compute-only, where an empty cell is an idle slot, or lowered::

    row    := cell ("," cell)*
    cell   := "" | action
    action := simple | "(" simple (";" simple)* ")OVERLAP_F_B"
    simple := stage OP [microbatch]

Its stages form a chain, so a send or receive names only its own stage; the peer stage is added here.
"""

import csv
import io
import re
from collections.abc import Iterator, Sequence

from attrs import frozen

from ..actions import COMM_KINDS, COMPUTE_KINDS, Action, Kind, parse_action
from ..costs.costs import StageCosts
from ..errors import RequestError
from ..files.limits import DOCUMENT, Limits
from ..timing.orders import evaluate

_GROUP = re.compile(r"\((?P<parts>[^()]*)\)OVERLAP_F_B")
_SHARDING = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)")


@frozen
class ScheduleFile:
    """The contents of a schedule file.

    Args:
        device_actions: per device F, I, W and B in order.
        lowered: per device these with the sends and receives, in order; None if the file has no sends and receives.
        placement: device of every stage.
        microbatches: number in the file.
        notes: a line for each instruction in the file that panpipe replaces by its own choice.
    """

    device_actions: tuple[tuple[Action, ...], ...]
    lowered: tuple[tuple[Action, ...], ...] | None
    placement: tuple[int, ...]
    microbatches: int
    notes: tuple[str, ...] = ()


def parse_schedule_csv(text: str, origin: str) -> ScheduleFile:
    """Read a schedule file, compute-only or lowered.

    UNSHARD, RESHARD and REDUCE_GRAD are dropped, because lowering places parameters and reductions; the actions of an
    overlapped group run in the written order. Both add a note. Empty rows at the end are dropped.

    Args:
        text: the file.
        origin: its name in errors, usually its path.

    Raises:
        RequestError: a cell is not exactly an action (the message names row and column, from 1, and value), a send or
            receive leaves the chain of stages, a stage runs on two devices or on none, or there are no actions.
    """
    dropped: dict[str, int] = {}
    rows: list[tuple[Action, ...]] = []
    for row, cells in enumerate(parse_csv(text, origin), start=1):
        actions: list[Action] = []
        for column, cell in enumerate(cells, start=1):
            try:
                actions += _parse_cell(cell.strip(), dropped)
            except RequestError as error:
                raise RequestError(f"{origin}, row {row}, column {column}: {error}") from None
        rows.append(tuple(actions))
    while rows and not rows[-1]:
        rows.pop()
    if not rows:
        raise RequestError(
            f"{origin} holds no actions: a schedule file has one row of cells such as 0F0 for each device"
        )
    placement = _placement(rows, origin)
    _check_chain(rows, len(placement), origin)
    device_actions = tuple(tuple(action for action in row if action.kind in COMPUTE_KINDS) for row in rows)
    lowered = tuple(rows) if any(action.kind in COMM_KINDS for row in rows for action in row) else None
    microbatches = 1 + max(action.microbatch for row in rows for action in row if action.microbatch is not None)
    return ScheduleFile(device_actions, lowered, placement, microbatches, tuple(_notes(dropped)))


def schedule_csv(device_actions: Sequence[Sequence[Action]], placement: Sequence[int]) -> str:
    """The compute-only file of a compute order, for a chain of stages.

    Every action is in the slot in which it would run if each took one unit of time; empty cells are idle slots of the
    device. So columns are time steps, and readers skip the empty cells.

    Raises:
        RequestError: the order deadlocks or is not a compute order.
    """
    starts = evaluate(device_actions, placement, [StageCosts(1, 1, 1, backward_s=1)] * len(placement)).starts
    out = io.StringIO(newline="")
    writer = csv.writer(out)
    for actions, slots in zip(device_actions, starts, strict=True):
        row = [""] * (int(slots[-1]) + 1 if slots else 1)
        for action, slot in zip(actions, slots, strict=True):
            row[int(slot)] = str(action)
        writer.writerow(row)
    return out.getvalue()


def _parse_cell(cell: str, dropped: dict[str, int]) -> list[Action]:
    """The actions of one cell; counts dropped instructions in ``dropped``."""
    if cell == "":
        return []
    if match := _SHARDING.fullmatch(cell):
        dropped[match[1]] = dropped.get(match[1], 0) + 1
        return []
    if match := _GROUP.fullmatch(cell):
        dropped["OVERLAP_F_B"] = dropped.get("OVERLAP_F_B", 0) + 1
        parts = [_parse_simple(part.strip()) for part in match["parts"].split(";")]
        foreign = next((part for part in parts if part.kind not in COMPUTE_KINDS), None)
        if foreign is not None:
            raise RequestError(f"'{cell}' overlaps {foreign}: a group holds F, I, W and B only")
        return parts
    return [_parse_simple(cell)]


def _parse_simple(text: str) -> Action:
    """One action of the grammar, with the peer of a send or receive added."""
    if not text.isascii() or any(char in text for char in "<>() ;"):
        raise RequestError(f"'{text}' is not an action of this grammar: write <stage><kind><microbatch>, such as 2F0")
    action = parse_action(text)
    if action.kind not in COMPUTE_KINDS | COMM_KINDS:
        raise RequestError(f"'{text}' is not an action of this grammar: it has no {action.kind.value}")
    if action.kind not in COMM_KINDS:
        return action
    return Action(action.stage, action.kind, action.microbatch, _chain_peer(action))


def _chain_peer(action: Action) -> int:
    """The peer stage of a send or receive in a chain of stages."""
    return action.stage + (1 if action.kind in (Kind.SEND_F, Kind.RECV_B) else -1)


def _placement(rows: Sequence[Sequence[Action]], origin: str) -> tuple[int, ...]:
    where: dict[int, int] = {}
    for device, actions in enumerate(rows):
        for action in actions:
            if where.setdefault(action.stage, device) != device:
                raise RequestError(
                    f"{origin}, row {device + 1}: {action} runs stage {action.stage}, which row "
                    f"{where[action.stage] + 1} runs, too: a stage has one device"
                )
    missing = next((stage for stage in range(max(where)) if stage not in where), None)
    if missing is not None:
        raise RequestError(
            f"{origin} has stage {max(where)} and no stage {missing}: stages are numbered from 0, with no gap"
        )
    return tuple(where[stage] for stage in range(len(where)))


def _check_chain(rows: Sequence[Sequence[Action]], stages: int, origin: str) -> None:
    for row, actions in enumerate(rows, start=1):
        for action in actions:
            if action.peer is not None and not 0 <= action.peer < stages:
                word = f"{action.stage}{action.kind.value}{action.microbatch}"
                raise RequestError(
                    f"{origin}, row {row}: '{word}' has no peer stage: "
                    f"the stages are a chain from 0 to {stages - 1}; remove it"
                )


def _notes(dropped: dict[str, int]) -> list[str]:
    reasons = {
        "UNSHARD": "dropped: stages hold their parameters whole",
        "RESHARD": "dropped: stages hold their parameters whole",
        "REDUCE_GRAD": "dropped: lowering places the gradient reductions",
        "OVERLAP_F_B": "groups run in the written order, one action after another",
    }
    return [f"{count} {word} {reasons[word]}" for word, count in sorted(dropped.items())]


def parse_csv(text: str, origin: str, limits: Limits = DOCUMENT) -> Iterator[list[str]]:
    """The rows of a CSV file in the Excel dialect; the values of its limits are cells.

    Raises:
        RequestError: it is not CSV, or exceeds a limit.
    """
    if text.count(",") + text.count("\n") + text.count("\r") > limits.values:
        raise RequestError(f"{origin} has more than {limits.values} cells: write it again")
    rows = csv.reader(io.StringIO(text, newline=""))
    try:
        yield from rows
    except csv.Error as error:  # a cell above csv's own limit, a line break in one
        raise RequestError(f"{origin}, line {rows.line_num}: it is not CSV ({error}); write it again") from None
