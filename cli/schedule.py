"""``panpipe schedule``: a schedule for uniform stages, evaluated, and as a text chart."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ..answers.options import argument, json_flag, option, takes
from ..answers.output import check_writable, note, print_json, print_table, write_noted
from ..answers.uniform import UniformStages, build_schedule, figures, numbers
from ..core.actions import Action, Kind
from ..core.errors import naming
from ..core.ratios import bubble_ratio
from ..core.schedules.building_block import read_block
from ..core.schedules.meaning import meaning_of
from ..core.schedules.schedule_csv import schedule_csv
from ..core.schedules.scored import Scored

SEARCH = {
    "evaluations": "auto: orders to try; the default takes about ten seconds for 8 devices and 32 microbatches.",
    "seconds": "auto: time of the search, in place of --evaluations; the schedule's name then has their number.",
    "seed": "auto: seed of its random numbers.",
}
"""Options of the search, with their help."""


@takes(UniformStages)
def schedule(
    stages: UniformStages,
    name: str = argument(
        "gpipe, 1f1b, interleaved-1f1b, looped, zb-h1, zb-h2, zb-1p, zb-2p, zb-v, v-min, v-half, 1f1b-v, gis, gis-h, "
        "po-h, po-f, dualpipe-v, building-block; or auto: the fastest one that a search finds.", ..., metavar="NAME",
    ),
    *,
    rounds: int | None = option("interleaved-1f1b: number of groups of microbatches."),
    microbatches_per_loop: int | None = option("looped: microbatches in one loop before the next."),
    run_ahead: str | None = option("looped: forwards before the first backward, per device.", metavar="N0,N1,…"),
    group_size: int | None = option("gis: microbatches that pass a device's stages together."),
    block: Path | None = option("building-block: the file of the block (JSON)."),
    csv: Path | None = option("Write the order for torch.distributed.pipelining."),
    svg: Path | None = option("Write a drawing of every device's order and memory."),
    html: Path | None = option("Write a page with both, to zoom into."),
    evaluations: int | None = option(SEARCH["evaluations"]),
    seconds: float | None = option(SEARCH["seconds"]),
    seed: int | None = option(SEARCH["seed"]),
    json: bool = json_flag(),
) -> None:  # fmt: skip
    """Build a schedule for uniform stages and evaluate it.

    Times may be in any unit. The unit of memory is one device's saved tensors for one microbatch, which are held until
    W or B ends. Tensors that po-h and po-f copy to the host do not count while they are there.
    """
    check_writable(csv, svg, html)
    parameters: dict[str, Any] = {
        "rounds": rounds, "microbatches_per_loop": microbatches_per_loop, "group_size": group_size,
        "run_ahead": None if run_ahead is None else numbers("--run-ahead", run_ahead, int),
        "block": None if block is None else read_block(block),
        "evaluations": evaluations, "seconds": seconds, "seed": seed,
    }  # fmt: skip
    given = {key: value for key, value in parameters.items() if value is not None}
    with naming(*([] if block is None else [block])):
        scored = build_schedule(name, stages, given)
    write_noted(csv, lambda: schedule_csv(scored.schedule.device_actions, scored.schedule.placement))
    if svg is not None or html is not None:
        from ..core.report.schedule import schedule_html, schedule_svg  # here: it loads numpy

        write_noted(svg, lambda: schedule_svg(scored))
        write_noted(html, lambda: schedule_html(scored))
    if json:
        print_json(_answer(scored))
    else:
        _show(scored)


def _answer(scored: Scored) -> dict[str, Any]:
    result, problem = scored.result, scored.problem
    return {
        **figures(scored),
        "devices": problem.devices,
        "microbatches": problem.microbatches,
        "peak_memory": [peak / problem.chunks for peak in result.peak_memory],
        "busy": list(result.busy),
        "evaluations": scored.evaluations,
        "placement": list(scored.schedule.placement),
        "device_actions": [[str(action) for action in actions] for actions in scored.schedule.device_actions],
        **({"offload": dict(scored.schedule.offload)} if scored.schedule.offload else {}),
    }


def _show(scored: Scored) -> None:
    answer, result = _answer(scored), scored.result
    if (meaning := meaning_of(scored.schedule.name)) is not None:
        note(f"{scored.schedule.name}: {meaning}")
    if scored.bound is not None:
        note(
            f"auto: the fastest of {scored.evaluations} orders tried; no order can be faster than {scored.bound:.6g} "
            f"(gap {scored.gap:.1%})"
        )
    rows = [
        (str(device), len(actions), busy, f"{bubble_ratio(busy, result.makespan):.1%}", peak)
        for device, (actions, busy, peak) in enumerate(
            zip(scored.schedule.device_actions, result.busy, answer["peak_memory"], strict=True)
        )
    ]
    console = Console(highlight=False)
    console.print(scored.schedule.name, style="bold", soft_wrap=True)
    print_table("", ("device", "actions", "busy", "idle share", "peak memory"), rows)
    console.print(
        f"makespan {result.makespan:.6g}   bubble {result.bubble_ratio:.1%}   "
        f"stage span {result.stage_span:.6g}, bubble {result.stage_span_bubble_ratio:.1%}"
    )
    width = max(console.width - len(str(scored.problem.devices - 1)) - 1, 20)
    for line in gantt(scored.schedule.device_actions, result.starts, result.ends, result.makespan, width):
        console.print(line, no_wrap=True, crop=True)


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
        starts, ends: per device, of each of its actions.
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
