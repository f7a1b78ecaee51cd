"""``panpipe validate``: whether a plan, or a schedule file, runs to the end and fits."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ..core.actions import Action, Kind
from ..core.costs import StageEdge
from ..core.documents import as_plain, read_text
from ..core.plan import Mesh, Plan, Stage, parse_plan
from ..core.schedule_csv import ScheduleFile, parse_schedule_csv
from .output import bytes_text, note, print_json, print_table


def validate(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PLAN-OR-CSV",
            help="A plan, or a schedule file of torch.distributed.pipelining.",
            show_default=False,
        ),
    ],
    json: Annotated[bool, typer.Option("--json", help="Print JSON alone.")] = False,
) -> None:
    """Check placement, every action, message order, deadlocks and memory, before anything runs.

    Exit status 0: it runs to the end and fits. 2: it does not run, and the message says why; a deadlock is told as its
    cycle. 3: a device does not have the memory.
    """
    from ..core.validate import validate as check

    plan, lowered = _read(path)
    report = check(plan, lowered=lowered)
    for warning in report.warnings:
        note(f"warning: {warning}")
    actions = sum(len(order) for order in plan.device_actions)
    if json:
        print_json(_answer(plan, actions, as_plain(report)))
        return
    print(
        f"{path} is valid: {len(plan.stages)} stages on {plan.devices} devices, {plan.microbatches} microbatches, "
        f"{actions} compute actions"
    )
    if report.peak_memory_bytes and plan.prediction is not None:
        rows = [
            (
                f"{number} {device.name}",
                bytes_text(saved),
                bytes_text(peak),
                str(action),
                bytes_text(device.memory_bytes),
            )
            for number, (device, saved, peak, action) in enumerate(
                zip(
                    plan.prediction.cluster.devices,
                    report.peak_saved_bytes,
                    report.peak_memory_bytes,
                    report.peak_actions,
                    strict=False,
                )
            )
        ]
        print_table("Memory", ("device", "peak saved", "peak of everything", "at", "memory"), rows)


def _answer(plan: Plan, actions: int, report: dict[str, Any]) -> dict[str, Any]:
    return {
        "valid": True,
        "devices": plan.devices,
        "stages": len(plan.stages),
        "microbatches": plan.microbatches,
        "actions": actions,
        **report,
    }


def _read(path: Path) -> tuple[Plan, tuple[tuple[Action, ...], ...] | None]:
    """A plan document, or a schedule file as a plan without costs and what it lowers itself."""
    text = read_text(path)
    if path.suffix == ".json" or text.lstrip().startswith("{"):
        return parse_plan(text, str(path)), None
    file = parse_schedule_csv(text, str(path))
    for line in file.notes:
        note(f"note: {line}")
    return _as_plan(file, path.stem), None if file.lowered is None else _with_steps(file, file.lowered)


def _as_plan(file: ScheduleFile, name: str) -> Plan:
    stages = tuple(Stage(index, device, (f"stage{index}",)) for index, device in enumerate(file.placement))
    edges = tuple(StageEdge(index, index + 1, 1, 1) for index in range(len(stages) - 1))
    mesh = Mesh(len(file.device_actions))
    return Plan(name, "", mesh, file.microbatches, name, stages, edges, file.device_actions)


def _with_steps(file: ScheduleFile, lowered: tuple[tuple[Action, ...], ...]) -> tuple[tuple[Action, ...], ...]:
    """That grammar has no word for the optimizer step: it stands behind everything else."""
    return tuple(
        actions + tuple(Action(stage, Kind.STEP) for stage, where in enumerate(file.placement) if where == device)
        for device, actions in enumerate(lowered)
    )
