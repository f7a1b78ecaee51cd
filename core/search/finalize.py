"""From walks to plans with predictions: the oracle's score decides."""

from collections.abc import Iterable, Sequence
from math import inf

import numpy as np
from attrs import evolve, frozen

from ..cluster.mesh import Mesh, least_by_position
from ..costs.costs import StageCosts
from ..plan.plan import MemoryPolicy, Plan, Prediction
from ..policies.sharding import replica_costs, with_level
from ..schedules.problem import Schedule
from ..tradeoff import EQUAL, by_time
from .annealing.walk import Walk
from .problem.assemble import assemble, with_replicas
from .problem.oracle import Oracle, Score, by_position
from .problem.setting import Setting
from .suggestions.infeasible import NothingFits, excess_bytes, too_large
from .unsharded_runs import with_runs

Rank = tuple[float, float]
"""Smaller is better: bytes of the worst device above its limit, then the step time."""


@frozen
class ScoredPlan:
    """A plan with its costs, score, setting and memory limits in bytes per device.

    ``contended_s`` is its step where messages share links, if a judge other than the oracle has timed it.
    """

    plan: Plan
    costs: tuple[StageCosts, ...]
    score: Score
    setting: Setting
    limits: tuple[float, ...]
    contended_s: float | None = None

    @property
    def excess(self) -> tuple[float, ...]:
        """Bytes by which each device exceeds its limit; 0 if it does not."""
        return excess_bytes(self.score.peak_memory_bytes, self.limits)

    @property
    def most_bytes(self) -> float:
        """Peak of the fullest device."""
        return max(self.score.peak_memory_bytes)

    @property
    def rank(self) -> Rank:
        """For comparisons with other plans."""
        return max(self.excess), self.score.step_s if self.contended_s is None else self.contended_s


def best_first(found: Iterable[ScoredPlan]) -> list[ScoredPlan]:
    """The plans that fit by time and memory, then the others by their rank."""
    known = list(found)
    fit = [scored for scored in known if scored.rank[0] == 0]
    others = sorted((scored for scored in known if scored.rank[0] > 0), key=lambda scored: scored.rank)
    return [*by_time(fit, lambda scored: scored.rank[1], lambda scored: scored.most_bytes), *others]


def draft(walk: Walk) -> tuple[Plan, tuple[StageCosts, ...]]:
    """The plan of a walk's best candidate, without a prediction, and the costs of its stages.

    With one replica, devices have the cluster's numbers; with more, they are positions that the mesh maps to devices.
    """
    setting = walk.setting
    placement = walk.best.placement.tolist()
    whole = setting if setting.whole is None else setting.whole
    stages, costs, edges = whole.staged(walk.best.cuts.tolist(), placement)
    orders, replica = walk.orders(), setting.replicas[0]
    data = len(setting.replicas)
    if data == 1:
        by_device = dict(zip(replica, orders, strict=True))
        orders = tuple(by_device[device] for device in sorted(replica))
        placement = [replica[position] for position in placement]
    schedule = Schedule(walk.name, tuple(placement), setting.microbatches, orders)
    plan = assemble(whole.graph, stages, schedule, parameter_sizes=setting.parameter_sizes, edges=edges)
    mesh = Mesh(setting.devices, data, setting.replicas)
    if data == 1 or mesh.cluster_devices == tuple(range(mesh.ranks)):
        mesh = Mesh(setting.devices, data)
    memory = MemoryPolicy(recompute=tuple(np.flatnonzero(walk.best.recompute).tolist()))
    plan = with_level(evolve(plan, mesh=mesh, memory=memory), setting.shard, setting.sharing)
    return plan, costs if setting.fixed else with_replicas(whole.graph, costs, plan.tied)


def score_walk(walk: Walk, oracle: Oracle) -> ScoredPlan:
    """A walk's plan with the oracle's score."""
    plan, costs = draft(walk)
    return score_plan(walk.setting, plan, costs, oracle)


def score_plan(setting: Setting, plan: Plan, costs: tuple[StageCosts, ...], oracle: Oracle) -> ScoredPlan:
    """A plan in a setting with the oracle's score."""
    limits = limits_of(setting, plan)
    plan = with_runs(plan, costs, setting.cluster, limits)
    score = by_position(oracle(plan, costs, setting.cluster), setting.devices)
    return ScoredPlan(plan, costs, score, setting, limits)


def judged(scored: ScoredPlan, judge: Oracle) -> ScoredPlan:
    """A scored plan with the judge's step time."""
    return evolve(scored, contended_s=judge(scored.plan, scored.costs, scored.setting.cluster).step_s)


def limits_of(setting: Setting, plan: Plan) -> tuple[float, ...]:
    """Bytes that the device at each position of a plan may hold, in every replica."""
    return tuple(map(float, least_by_position(setting.memory, plan.mesh.replicas)))


def predicted(scored: ScoredPlan, evaluations: int) -> Plan:
    """A scored plan's plan with its prediction."""
    score = scored.score
    return evolve(
        scored.plan,
        prediction=Prediction(
            costs=scored.costs,
            cluster=scored.setting.cluster,
            step_s=score.step_s,
            peak_memory_bytes=score.peak_memory_bytes,
            peak_saved_bytes=score.peak_saved_bytes,
            bubble_ratio=score.bubble_ratio,
            evaluations=evaluations,
        ),
    )


def rescored(walks: Sequence[Walk], oracle: Oracle, most: int) -> list[ScoredPlan]:
    """The first walks, scored by the oracle, in their order; more than ``most`` only until one fits.

    No oracle's step is shorter than the search's: walks slower than a plan that fits are not scored.
    """
    found: list[ScoredPlan] = []
    for walk in walks:
        fitting_s = min((scored.score.step_s for scored in found if scored.rank[0] == 0), default=inf)
        if fitting_s < inf and (len(found) >= most or walk.step_s > (1 + EQUAL) * fitting_s):
            break
        found.append(score_walk(walk, oracle))
    return found


def refuse_above(best: ScoredPlan, evaluations: int) -> None:
    """Refuse a plan that exceeds a device's memory limit.

    Raises:
        NothingFits: one line: the device that exceeds its limit most, its memory by kind, and the memory with which
            this plan fits.
    """
    excess = max(best.excess)
    if excess <= 0:
        return
    score, limits, plan = best.score, best.limits, best.plan
    device = best.excess.index(excess)
    need, saved, limit = score.peak_memory_bytes[device], score.peak_saved_bytes[device], limits[device]
    held = replica_costs(plan, best.costs)
    state = sum(held[stage.index].state_bytes for stage in plan.stages_on(device))
    name = best.setting.cluster.devices[plan.mesh.cluster_devices[device]].name
    large = too_large(best.setting.graph, max(best.setting.memory), saves=not plan.memory.recompute)
    alone = "" if large is None else f"no device can hold operator '{large.name}' while it runs; "
    raise NothingFits(
        f"{alone}device {device} ('{name}') needs {need:.0f} bytes and may hold {limit:.0f}: {state:.0f} of "
        f"parameters, gradients and optimizer state, {saved:.0f} of saved tensors (held by {plan.schedule}, "
        f"{plan.microbatches} microbatches), {max(need - state - saved, 0.0):.0f} of workspace; this plan "
        f"fits with {excess:.0f} bytes more a device, {limit + excess:.0f} in all",
        predicted(best, evaluations), limits,
    )  # fmt: skip
