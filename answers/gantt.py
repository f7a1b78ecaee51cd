"""A schedule as a text chart: one line per device, time from left to right."""

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
    """One line per device. An action's label is its kind and microbatch if it is wide enough, otherwise its kind.

    Args:
        device_actions: per device.
        starts, ends: per device, of each of its actions.
        makespan: the time of the whole chart.
        width: characters for the chart, after the device's number.
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
    """``F12`` and a line as long as the action, followed by a gap if there is space."""
    label = f"{action.kind.value}{action.microbatch}"
    if len(label) > width:
        return action.kind.value + "─" * (width - 1)
    return label if len(label) == width else label + "─" * (width - len(label) - 1) + " "
