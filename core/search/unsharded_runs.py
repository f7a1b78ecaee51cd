"""When the parameters of a stage are whole, where its replicas share them: chosen for an order and a memory limit.

1. Each block of adjacent actions of a stage is a run. This holds least.
2. Shortest first, parameters stay whole over the actions of other stages between two runs where they fit, if the
   all-gather that this saves would be exposed: it takes longer than these actions, or all collectives of the device
   take longer than its actions.
3. Each all-gather starts early enough to end before the run, while earlier actions compute, where the parameters fit.

It needs what FSDP decides by heuristics (Zhao et al., arXiv 2304.11277, sections 3.3 and 4.1: what is resharded after
forward, and prefetch) for runs of microbatches; the breadth-first schedule of Lamy-Poirier (arXiv 2211.05953) has the
longest ones.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise

import numpy as np
from attrs import define, evolve

from ..actions import COMPUTE_KINDS, Action, Kind
from ..cluster.cluster import Cluster
from ..costs.costs import COMPUTE_SECONDS, StageCosts
from ..lowering.lowering import lower
from ..lowering.queues import queues_of
from ..lowering.residency import device_timelines
from ..plan.memory_policy import StageUnshard, UnshardedRun
from ..plan.plan import Plan
from ..policies.replicas import over_replicas
from ..policies.sharding import replica_costs, shards_parameters
from ..timing.coding import Floats


def with_runs(plan: Plan, costs: Sequence[StageCosts], cluster: Cluster, limits: Sequence[float]) -> Plan:
    """The plan with the runs of all stages whose replicas share parameters; without runs if there are none.

    Args:
        plan: sound, but for its runs.
        costs: per stage, of the whole stage.
        limits: bytes that the device at each position may hold.
    """
    sharing = [stage.index for stage in plan.stages if shards_parameters(plan, stage.index)]
    found: dict[int, StageUnshard] = {}
    cluster = plan.mesh.arrange(cluster)
    held, working = replica_costs(plan, costs), _working_bytes(plan, costs) if sharing else []
    for device, actions in enumerate(plan.device_actions if sharing else ()):
        own = [stage for stage in sharing if plan.placement[stage] == device]
        room = limits[device] - working[device]
        elapsed = np.cumsum([0.0, *(COMPUTE_SECONDS[action.kind](costs[action.stage]) for action in actions)])
        blocks = [(s, list(at)) for s, at in groupby(range(len(actions)), key=lambda at: actions[at].stage)]
        runs = [_Run(s, at[0], at[-1], held[s].gathered_bytes) for s, at in sorted(blocks) if s in own]
        for run in runs:
            room[run.first : run.last + 1] -= run.bytes
        gather_s, scatter_s = (
            {stage: over_replicas(kind, stage, plan, costs, cluster).alone_s for stage in own}
            for kind in (Kind.UNSHARD, Kind.SCATTER_GRAD)
        )
        load_s = sum(gather_s[run.stage] for run in runs)
        load_s += sum(scatter_s.get(action.stage, 0.0) for action in actions if action.kind in (Kind.B, Kind.W))
        hides = load_s <= elapsed[-1]
        runs = _joined(runs, room, elapsed, gather_s if hides else None)
        for run in runs:
            _start_early(run, room, elapsed, gather_s[run.stage])
        found |= {
            stage: StageUnshard(stage, tuple(run.planned(actions) for run in runs if run.stage == stage))
            for stage in own
        }
    unshard = tuple(found[stage] for stage in sharing)
    return plan if unshard == plan.memory.unshard else evolve(plan, memory=evolve(plan.memory, unshard=unshard))


def _working_bytes(plan: Plan, costs: Sequence[StageCosts]) -> list[Floats]:
    """Per device the bytes that it holds while each action of its compute order runs, without gathered parameters and
    messages."""
    bare = evolve(plan, edges=(), tied=(), memory=evolve(plan.memory, unshard=()))
    queues = queues_of(bare, lower(bare))
    at_once = [([0.0] * len(actions), [0.0] * len(actions)) for actions in queues.compute]
    return [
        each.working[1::2][[action.kind in COMPUTE_KINDS for action in each.actions]]
        for each in device_timelines(bare, costs, queues, at_once, {})
    ]


@define
class _Run:
    """A run, by positions in the compute order: from the first to the last action, held from ``begin`` on."""

    stage: int
    first: int
    last: int
    bytes: float
    begin: int = -1
    before: int = -1
    """Position of the last action of the stage before the run; −1 if there is none."""
    continues: bool = False
    """Whether parameters stay whole from the run before it on."""

    def planned(self, actions: Sequence[Action]) -> UnshardedRun:
        after = actions[self.begin - 1] if self.begin else None
        return UnshardedRun(after, actions[self.first], actions[self.last])


def _start_early(run: _Run, room: Floats, elapsed: Floats, gather_s: float) -> None:
    """Start the all-gather of a run so early that it is hidden, as far as the parameters fit."""
    run.begin = run.first
    while elapsed[run.first] - elapsed[run.begin] < gather_s and run.begin - 1 > run.before:
        if room[run.begin - 1] < run.bytes:
            break
        run.begin -= 1
    room[run.begin : run.first] -= run.bytes


def _joined(runs: Sequence[_Run], room: Floats, elapsed: Floats, hidden_s: Mapping[int, float] | None) -> list[_Run]:
    """The runs, joined where the parameters fit between two of a stage; by position.

    Args:
        runs: of a device, those of each stage together.
        room: bytes that are left on the device while each of its actions runs.
        elapsed: seconds of all actions before each position.
        hidden_s: seconds of the actions between two runs of each stage that hide its all-gather; None if none do.
    """
    gaps = [(one, other) for one, other in pairwise(runs) if one.stage == other.stage]
    for one, other in sorted(gaps, key=lambda gap: (gap[1].first - gap[0].last, gap[0].last)):
        between = slice(one.last + 1, other.first)
        if hidden_s is not None and elapsed[other.first] - elapsed[one.last + 1] >= hidden_s[one.stage]:
            continue
        if (room[between] >= one.bytes).all():
            room[between] -= one.bytes
            other.continues = True
    result: list[_Run] = []
    for run in runs:
        if run.continues:
            result[-1].last = run.last
            continue
        if result and result[-1].stage == run.stage:
            run.before = result[-1].last
        result.append(run)
    return sorted(result, key=lambda run: run.first)
