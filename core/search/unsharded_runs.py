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
from functools import cached_property
from itertools import accumulate, groupby, pairwise

from attrs import define, evolve

from ..actions import Action, Kind
from ..cluster.cluster import Cluster
from ..costs.costs import COMPUTE_SECONDS, StageCosts
from ..plan.memory_policy import StageUnshard, UnshardedRun
from ..plan.plan import Plan
from ..policies.replicas import over_replicas
from ..policies.sharding import replica_costs, shards_parameters
from .problem.oracle import working_bytes


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
    held = replica_costs(plan, costs)
    for device, actions in enumerate(plan.device_actions if sharing else ()):
        own = [stage for stage in sharing if plan.placement[stage] == device]
        working = working_bytes(plan, costs, cluster, device) if own else []
        room = _Room(
            actions,
            [COMPUTE_SECONDS[action.kind](costs[action.stage]) for action in actions],
            [limits[device] - size for size in working],
        )
        blocks = [(s, list(at)) for s, at in groupby(range(len(actions)), key=lambda at: actions[at].stage)]
        runs = [_Run(s, at[0], at[-1], held[s].gathered_bytes) for s, at in sorted(blocks) if s in own]
        for run in runs:
            room.take(run.first, run.last, run.bytes)
        gather_s, scatter_s = (
            {stage: over_replicas(kind, stage, plan, costs, cluster).alone_s for stage in own}
            for kind in (Kind.UNSHARD, Kind.SCATTER_GRAD)
        )
        load_s = sum(gather_s[run.stage] for run in runs)
        load_s += sum(scatter_s.get(action.stage, 0.0) for action in actions if action.kind in (Kind.B, Kind.W))
        hides = load_s <= sum(room.seconds)
        runs = _joined(runs, room, gather_s if hides else None)
        for run in runs:
            room.start_early(run, gather_s[run.stage])
        found |= {
            stage: StageUnshard(stage, tuple(run.planned(actions) for run in runs if run.stage == stage))
            for stage in own
        }
    unshard = tuple(found[stage] for stage in sharing)
    return plan if unshard == plan.memory.unshard else evolve(plan, memory=evolve(plan.memory, unshard=unshard))


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


@define(slots=False)
class _Room:
    """The memory that is left on a device while each of its actions runs.

    Args:
        actions: its compute order.
        seconds: of each action.
        bytes: that are left.
    """

    actions: Sequence[Action]
    seconds: Sequence[float]
    bytes: list[float]

    @cached_property
    def elapsed(self) -> list[float]:
        """Seconds of all actions before each position."""
        return [0.0, *accumulate(self.seconds)]

    def fits(self, first: int, last: int, size: float) -> bool:
        """Whether as many bytes are left while all actions of these positions run."""
        return all(left >= size for left in self.bytes[first : last + 1])

    def take(self, first: int, last: int, size: float) -> None:
        """Use bytes while the actions of these positions run."""
        for position in range(first, last + 1):
            self.bytes[position] -= size

    def start_early(self, run: _Run, gather_s: float) -> None:
        """Start the all-gather of a run so early that it is hidden, as far as the parameters fit."""
        begin, hidden_s = run.first, 0.0
        while hidden_s < gather_s and begin - 1 > run.before and self.fits(begin - 1, begin - 1, run.bytes):
            begin -= 1
            hidden_s += self.seconds[begin]
        self.take(begin, run.first - 1, run.bytes)
        run.begin = begin


def _joined(runs: Sequence[_Run], room: _Room, hidden_s: Mapping[int, float] | None) -> list[_Run]:
    """The runs, joined where the parameters fit between two of a stage; by position.

    Args:
        runs: of a device, those of each stage together.
        hidden_s: seconds of the actions between two runs of each stage that hide its all-gather; None if none do.
    """
    gaps = [(one, other) for one, other in pairwise(runs) if one.stage == other.stage]
    for one, other in sorted(gaps, key=lambda gap: (gap[1].first - gap[0].last, gap[0].last)):
        if hidden_s is not None and room.elapsed[other.first] - room.elapsed[one.last + 1] >= hidden_s[one.stage]:
            continue
        if room.fits(one.last + 1, other.first - 1, one.bytes):
            room.take(one.last + 1, other.first - 1, one.bytes)
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
