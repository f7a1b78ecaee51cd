"""Reads plans and schedule files, for ``validate`` and ``simulate``."""

from collections.abc import Sequence
from pathlib import Path

from attrs import frozen

from ..core.actions import Action, Kind
from ..core.cluster.mesh import Mesh
from ..core.costs.costs import StageEdge
from ..core.files.read import read_text
from ..core.plan.plan import Plan, Stage, parse_plan
from ..core.schedules.schedule_csv import ScheduleFile, parse_schedule_csv
from .output import note


@frozen
class PlanFile:
    """The contents of a plan file or a schedule file."""

    plan: Plan
    is_schedule: bool = False
    lowered: tuple[tuple[Action, ...], ...] | None = None


def read_plan_or_schedule(path: Path) -> PlanFile:
    """Read a plan document or a schedule file, distinguished by its extension or its first character."""
    text = read_text(path)
    if path.suffix == ".json" or text.lstrip().startswith("{"):
        return PlanFile(parse_plan(text, str(path)))
    file = parse_schedule_csv(text, str(path))
    for line in file.notes:
        note(f"note: {line}")
    lowered = None if file.lowered is None else _with_steps(file, file.lowered)
    return PlanFile(plan_of_order(path.stem, file.device_actions, file.placement, file.microbatches), True, lowered)


def plan_of_order(
    name: str, device_actions: Sequence[Sequence[Action]], placement: Sequence[int], microbatches: int
) -> Plan:
    """A plan without costs that runs an order on a chain of stages."""
    stages = tuple(Stage(index, device, (f"stage{index}",)) for index, device in enumerate(placement))
    edges = tuple(StageEdge(index, index + 1, 1, 1) for index in range(len(stages) - 1))
    orders = tuple(map(tuple, device_actions))
    return Plan(name, "", Mesh(len(orders)), microbatches, name, stages, edges, orders)


def _with_steps(file: ScheduleFile, lowered: tuple[tuple[Action, ...], ...]) -> tuple[tuple[Action, ...], ...]:
    """Append the optimizer steps, which the schedule file's grammar does not have, after all other actions."""
    return tuple(
        actions + tuple(Action(stage, Kind.STEP) for stage, where in enumerate(file.placement) if where == device)
        for device, actions in enumerate(lowered)
    )
