"""Plans whose saved tensors leave, made by hand from the programs of their stages."""

from collections.abc import Collection

import torch
from attrs import evolve
from panpipe.core.actions import Action, Kind
from panpipe.core.capture.export.operators import Operators
from panpipe.core.plan.memory_policy import HostCopy, StageOffload, Storage
from panpipe.core.plan.plan import Plan
from panpipe.runtimes.offload.offloads import reason_to_keep
from panpipe.runtimes.programs.compiled import Programs, compile_stages


def all_away(
    plan: Plan,
    operators: Operators,
    stages: Collection[int] | None = None,
    queues: int = 1,
    known: Programs | None = None,
) -> Plan:
    """The plan with every storage on the host for as long as it may be, however small it is.

    Args:
        plan: the plan; stages that recompute keep what they have.
        operators: of the captured step.
        stages: that offload; all by default.
        queues: host-copy queues of a device.
        known: programs of the stages, which are reused.
    """
    names, stages_of_plan = [stage.nodes for stage in plan.stages], range(len(plan.stages))
    where = dict.fromkeys(stages_of_plan, torch.device("cpu"))
    compiled = compile_stages(operators, names, stages_of_plan, where, known=known)
    found = []
    for stage in range(len(plan.stages)):
        if stage in plan.memory.recompute or (stages is not None and stage not in stages):
            continue
        storages = tuple(
            Storage(storage.name, storage.bytes)
            for storage in compiled.programs[stage].storages
            if not reason_to_keep(storage, stage, compiled, plan.placement) and storage.bytes
        )
        copies = longest_away(plan, stage)
        if storages and copies:
            found.append(StageOffload(stage, storages, copies))
    return evolve(plan, memory=evolve(plan.memory, offload=tuple(found), host_copy_queues=queues))


def longest_away(plan: Plan, stage: int) -> tuple[HostCopy, ...]:
    """Copies of every microbatch: freed when the next action starts, back when the last one before its reader ends."""
    actions = plan.device_actions[plan.placement[stage]]
    found = []
    for microbatch in range(plan.microbatches):
        forward = actions.index(Action(stage, Kind.F, microbatch))
        backward = next(
            at for at, a in enumerate(actions) if (a.stage, a.microbatch) == (stage, microbatch) and a.kind in "BI"
        )
        if backward - forward >= 2:
            found.append(HostCopy(microbatch, actions[forward + 1], actions[backward - 1]))
    return tuple(found)
