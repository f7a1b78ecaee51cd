"""What the devices hold of saved tensors at the end of each action: by the storages' finalizers, and as predicted."""

from bisect import bisect_right

from panpipe.core.actions import WORK_KINDS, Action
from panpipe.core.capture.programs.stage_programs import StageMemory
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.costs import StageCosts
from panpipe.core.plan.plan import Plan
from panpipe.core.trace.trace import Trace
from panpipe.runtimes.pipeline import Pipeline
from panpipe.simulators.result import SimulationResult
from panpipe.simulators.run import simulate

from .plans import hosted

Held = list[list[tuple[str, float]]]
"""For each device every compute action, and the bytes held after it."""


def costs_of(memory: StageMemory) -> StageCosts:
    """A second for each program, with the memory that the programs were found to hold."""
    return StageCosts(
        1.0, 1.0, 1.0, saved_bytes=memory.saved, freed_by_input_bytes=memory.freed_by_input,
        created_by_input_bytes=memory.created_by_input, workspace_bytes=memory.workspace, input_bytes=memory.inputs,
    )  # fmt: skip


def simulated(plan: Plan, pipe: Pipeline) -> SimulationResult:
    """The plan's simulated step, on separate links, with the memory of the pipeline's programs."""
    costs = [costs_of(pipe._session.programs[stage.index].memory) for stage in plan.stages]
    return simulate(plan, costs, hosted(fully_connected(plan.devices, 10**9, 1e9, 0.25), 1e9))


def predicted(result: SimulationResult, passed: bool = False) -> Held:
    """Bytes by the memory timeline; with ``passed`` communication in addition to the saved tensors.

    A reload that the end of an action issues is in the timeline at that end, and is measured after it: not counted.
    """
    found: Held = []
    reloads: dict[Action, int] = {}
    for each in result.plan.memory.offload:
        for copy in each.copies:
            reloads[copy.reload_after] = reloads.get(copy.reload_after, 0) + each.bytes
    for timeline in result.timelines:
        after: dict[int, float] = {}
        for position, size in zip(
            timeline.operations.tolist(), timeline.moving[: 1 + passed].sum(axis=0).tolist(), strict=True
        ):
            after[position] = size
        actions = [(i, action) for i, action in enumerate(timeline.actions) if action.kind in WORK_KINDS]
        found.append([(str(action), after[i] - reloads.get(action, 0)) for i, action in actions])
    return found


def measured(trace: Trace) -> Held:
    """By a trace's samples of memory."""
    found: Held = []
    for device in range(trace.devices):
        samples = [s for s in trace.memory if s.device == device and s.kind == "saved"]
        times = [sample.time_s for sample in samples]
        events = [e for e in trace.events if e.device == device and e.action.kind in WORK_KINDS]
        at = [bisect_right(times, event.end_s) for event in events]
        sizes = [samples[i - 1].bytes if i else 0 for i in at]
        found.append([(str(event.action), size) for event, size in zip(events, sizes, strict=True)])
    return found
