"""``panpipe schedule``: a schedule for uniform stages, evaluated, and as a text chart."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..answers.output import check_writable, note, print_json, print_table
from ..answers.schedule import build_schedule
from ..answers.uniform import UniformStages, numbers, uniform_times
from ..core.actions import Action, Kind
from ..core.errors import naming
from ..core.files.write import write_text
from ..core.ratios import bubble_ratio
from ..core.schedules.building_block import read_block
from ..core.schedules.meaning import meaning_of
from ..core.schedules.schedule_csv import schedule_csv
from ..core.schedules.scored import Scored
from .uniform_options import (
    BackwardInput,
    BackwardWeight,
    Devices,
    Evaluations,
    Forward,
    FreedByInput,
    HostCopyTime,
    MemoryLimit,
    MessageTime,
    Microbatches,
    Seconds,
    Seed,
    StageScale,
)


def schedule(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="gpipe, 1f1b, interleaved-1f1b, looped, zb-h1, zb-h2, zb-1p, zb-2p, zb-v, v-min, v-half, 1f1b-v, gis, "
            "gis-h, po-h, po-f, dualpipe-v, building-block; or auto: the fastest one that a search finds.",
        ),
    ],
    *,
    devices: Devices,
    microbatches: Microbatches,
    chunks: Annotated[int | None, typer.Option(help="Number of stages of each device.", show_default=False)] = None,
    forward: Forward = 1,
    backward_input: BackwardInput = None,
    backward_weight: BackwardWeight = None,
    comm: MessageTime = 0,
    stage_scale: StageScale = None,
    freed_by_input: FreedByInput = 0,
    memory_limit: MemoryLimit = None,
    host_copy: HostCopyTime = 0,
    rounds: Annotated[
        int | None, typer.Option(help="interleaved-1f1b: number of groups of microbatches.", show_default=False)
    ] = None,
    microbatches_per_loop: Annotated[
        int | None, typer.Option(help="looped: microbatches in one loop before the next.", show_default=False)
    ] = None,
    run_ahead: Annotated[
        str | None,
        typer.Option(
            metavar="N0,N1,…", help="looped: forwards before the first backward, per device.", show_default=False
        ),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(help="gis: microbatches that pass a device's stages together.", show_default=False),
    ] = None,
    block: Annotated[
        Path | None, typer.Option(help="building-block: the file of the block (JSON).", show_default=False)
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Write the order for torch.distributed.pipelining.", show_default=False)
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(help="Write a drawing of every device's order and memory.", show_default=False)
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with both, to zoom into.", show_default=False)] = None,
    evaluations: Evaluations = None,
    seconds: Seconds = None,
    seed: Seed = None,
    json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
) -> None:
    """Build a schedule for uniform stages and evaluate it.

    Times may be in any unit. The unit of memory is one device's saved tensors for one microbatch, which are held until
    W or B ends. Tensors that po-h and po-f copy to the host do not count while they are there.
    """
    check_writable(csv, svg, html)
    times = uniform_times(forward, backward_input, backward_weight, freed_by_input)
    scales = None if stage_scale is None else numbers("--stage-scale", stage_scale, float)
    parameters: dict[str, Any] = {
        "rounds": rounds,
        "microbatches_per_loop": microbatches_per_loop,
        "run_ahead": None if run_ahead is None else numbers("--run-ahead", run_ahead, int),
        "group_size": group_size,
        "block": None if block is None else read_block(block),
        "evaluations": evaluations,
        "seconds": seconds,
        "seed": seed,
    }
    given = {key: value for key, value in parameters.items() if value is not None}
    stages = UniformStages(devices, microbatches, times, scales, comm, host_copy)
    with naming(*([] if block is None else [block])):
        scored = build_schedule(name, stages, chunks, given, memory_limit)
    if csv is not None:
        write_text(csv, schedule_csv(scored.schedule.device_actions, scored.schedule.placement))
    if svg is not None:
        from ..core.report.schedule import schedule_svg  # here: it loads numpy

        write_text(svg, schedule_svg(scored))
    if html is not None:
        from ..core.report.schedule import schedule_html  # here: it loads numpy

        write_text(html, schedule_html(scored))
    if json:
        print_json(_answer(scored))
    else:
        _show(scored)


def _answer(scored: Scored) -> dict[str, Any]:
    result, problem = scored.result, scored.problem
    return {
        "schedule": scored.schedule.name,
        "devices": problem.devices,
        "microbatches": problem.microbatches,
        "chunks": problem.chunks,
        "makespan": result.makespan,
        "stage_span": result.stage_span,
        "bubble_ratio": result.bubble_ratio,
        "stage_span_bubble_ratio": result.stage_span_bubble_ratio,
        "peak_memory": [peak / problem.chunks for peak in result.peak_memory],
        "busy": list(result.busy),
        "evaluations": scored.evaluations,
        **({} if scored.bound is None else {"lower_bound": scored.bound, "gap": scored.gap}),
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
