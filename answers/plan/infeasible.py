"""What ``panpipe plan`` prints if no plan fits: what exceeds its memory, and the smallest changes that help.

The error itself and the closest plan are in `core/search/suggestions/infeasible`, the changes in `changes` next to it.
"""

from collections.abc import Iterator
from typing import Any, NoReturn

from ...core.cluster.tensor_groups import GroupedCluster
from ...core.errors import InfeasibleError
from ...core.policies.sharding import SHARED
from ...core.schedules.meaning import short_name
from ...core.search.suggestions.changes import (
    MORE_DEVICES,
    MORE_MEMORY,
    OFFLOAD,
    RECOMPUTE,
    SHARD,
    SMALLER_MICROBATCHES,
    Change,
    more_memory,
    smallest_changes,
)
from ...core.search.suggestions.infeasible import NothingFits, excess, holding, operator_bytes, too_large
from ..output import bytes_text, print_json, seconds_text
from ..progress import noted
from .request import PlanRequest


def refuse(nothing: NothingFits, request: PlanRequest, *, json: bool) -> NoReturn:
    """Report what does not fit, and the changes with which a plan fits.

    Raises:
        InfeasibleError: always.
    """
    with noted(lambda: "no plan fits: searching for the smallest changes with which one does"):
        answer = InfeasibleAnswer(nothing, request)
    if json:
        print_json(answer.plain())
    raise InfeasibleError(answer.text())


class InfeasibleAnswer:
    """The answer if no plan fits."""

    def __init__(self, nothing: NothingFits, request: PlanRequest) -> None:
        from ...simulators.run import simulate

        problem, replan = request.problem, request.fitting
        memory = more_memory(nothing, problem, replan)
        self.microbatches = request.microbatches
        self.devices = len(request.machine.devices)
        self.tensor = request.machine.tensor if isinstance(request.machine, GroupedCluster) else 1
        self.plan = nothing.closest if memory is None else memory.found
        self.limits = problem.limits(self.plan)
        timelines = simulate(self.plan).timelines
        self.held = holding(self.plan, self.limits, timelines)
        self.saves = problem.recompute_excluded and problem.offload_excluded
        self.large = too_large(problem.least, problem.limit, saves=self.saves)
        self.changes = smallest_changes(problem, memory, replan)

    def plain(self) -> dict[str, Any]:
        """The data that ``--json`` prints."""
        held = self.held
        return {
            "feasible": False,
            "device": held.device,
            "action": None if held.action is None else str(held.action),
            "needs_bytes": held.bytes,
            "limit_bytes": held.limit,
            "excess_bytes": list(excess(self.plan, self.limits)),
            "holds_bytes": held.kinds,
            "schedule": self.plan.schedule,
            "stages": len(self.plan.stages),
            "too_large_operator": None if self.large is None else self.large.name,
            "changes": [self._plain_change(change) for change in self.changes],
        }

    def text(self) -> str:
        """The text; its first line is a summary."""
        held = self.held
        name = self.plan.predicted.cluster.devices[held.device].name
        kinds = ", ".join(f"{kind} {bytes_text(size)}" for kind, size in held.kinds.items() if size)
        width = max((len(change.what) for change in self.changes), default=0)
        smallest = self._change_text(self.changes[0]) if self.changes else "none was found"
        return "\n".join(
            (
                f"nothing found fits: device {held.device} ('{name}') needs {bytes_text(held.bytes)} at {held.action} "
                f"and may hold {bytes_text(held.limit)}; smallest change that fits: {smallest}",
                *self._too_large(),
                f"  comes closest: {short_name(self.plan.schedule)} of {len(self.plan.stages)} stages",
                f"  device {held.device} holds at {held.action}: {kinds}",
                "  with each of these alone a plan was found that fits:",
                *(f"    {change.what:<{width}}  {self._change_text(change)}" for change in self.changes),
            )
        )

    def _too_large(self) -> Iterator[str]:
        """A line about an operator that no device can hold."""
        if self.large is not None:
            needs = bytes_text(operator_bytes(self.large, saves=self.saves))
            yield f"  no device can hold operator '{self.large.name}': it alone needs {needs} while it runs"

    def _change_text(self, change: Change) -> str:
        return f"{self._described(change)[0]}, step at most {seconds_text(change.found.predicted.step_s)}"

    def _plain_change(self, change: Change) -> dict[str, Any]:
        _, unit, value = self._described(change)
        return {
            "change": change.what,
            unit: value,
            "step_s": change.found.predicted.step_s,
            "schedule": change.found.schedule,
        }

    def _described(self, change: Change) -> tuple[str, str, Any]:
        """A change in words, the name of its value in ``--json``, and that value."""
        value, found = change.value, change.found
        if change.what == MORE_DEVICES:
            devices = value * self.tensor
            return f"{devices:.0f} devices in place of {self.devices * self.tensor}", "devices", devices
        if change.what == SMALLER_MICROBATCHES:
            assert self.microbatches is not None
            size = f"each 1/{value / self.microbatches:.0f} the size"
            return f"{value:.0f} microbatches in place of {self.microbatches}, {size}", "microbatches", value
        if change.what == RECOMPUTE:
            stages = [stage for stage in found.memory.recompute if stage not in self.plan.memory.recompute]
            which = "the closest plan" if found.stages == self.plan.stages else found.schedule
            text = f"stage{'s' * (len(stages) > 1)} {' '.join(map(str, stages))} of {which}"
            return text, "stages", list(found.memory.recompute)
        if change.what == SHARD:
            level, shape = found.shard[0], f"pp={found.mesh.pipeline},dp={value:.0f}"
            text = f"--shard {level}: {value:.0f} replicas share {SHARED[level]}, with mesh {shape}"
            return text, "replicas", value
        if change.what == OFFLOAD:
            return f"--offload auto: {bytes_text(value)} a step to the host and back", "bytes", value
        assert change.what == MORE_MEMORY
        return f"{bytes_text(value)} more for each device", "bytes", value
