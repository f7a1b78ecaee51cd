"""A schedule as a chart of characters: one line a device, time from left to right."""

from collections.abc import Sequence

from rich.text import Text

from ..core.actions import Action, Kind

STYLES = {Kind.F: "black on bright_blue", Kind.B: "black on green", Kind.I: "black on cyan", Kind.W: "black on yellow"}
IDLE = "·"


def gantt(
    device_actions: Sequence[Sequence[Action]],
    starts: Sequence[Sequence[float]],
    ends: Sequence[Sequence[float]],
    makespan: float,
    width: int,
) -> list[Text]:
    """One line a device. An action is labelled with its kind and microbatch where it is wide enough, else by its kind.

    Args:
        device_actions: per device.
        starts, ends: per device, of each of its actions.
        makespan: the time that ``width`` characters stand for.
        width: characters for the chart, behind the device's number.
    """
    lines = []
    digits = len(str(len(device_actions) - 1))
    for device, actions in enumerate(device_actions):
        line = Text(f"{device:>{digits}} ")
        column = 0
        for action, start, end in zip(actions, starts[device], ends[device], strict=True):
            left, right = (round(moment / makespan * width) if makespan else 0 for moment in (start, end))
            left = max(left, column)
            if right <= left:
                continue
            line.append(IDLE * (left - column), "dim")
            line.append(_block(action, right - left), STYLES[action.kind])
            column = right
        line.append(IDLE * (width - column), "dim")
        lines.append(line)
    return lines


def _block(action: Action, width: int) -> str:
    """``F12`` and a line as long as the action, with a gap behind it where there is room."""
    label = f"{action.kind.value}{action.microbatch}"
    if len(label) > width:
        return action.kind.value + "─" * (width - 1)
    return label if len(label) == width else label + "─" * (width - len(label) - 1) + " "
