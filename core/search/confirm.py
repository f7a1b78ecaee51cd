"""From a search to its result: the oracle's score decides, and the search reserves memory that only the oracle counts.

The search models a message as a pure delay that takes no memory. An oracle such as the simulator models more, so it
scores the best few plans. If the leading one does not fit by its score, the search reserves memory and continues. If it
is slower because messages share links, the search continues with contention.

An evaluation with contention takes some fifty times as long as one without, so the search with contention is shorter:
all walks of the search without it are timed; the better ones are annealed further, with backwards split and joined.
Where no messages contend in the best plan, nothing is searched again.
"""

from collections.abc import Sequence

from attrs import evolve, frozen

from .. import tradeoff
from ..plan.plan import Plan
from ..policies.sharding import part_of_parameters
from .annealing.search import Round, all_rounds, evaluate_all, search
from .annealing.walk import Walk, best_by_placement, frontier, ranked
from .finalize import ScoredPlan, best_first, judged, predicted, refuse_above, rescored, score_walk
from .problem.meter import Meter, Stopped
from .problem.oracle import Oracle, longest_path
from .problem.setting import Setting
from .search_options import SearchOptions

MESSAGES = 4
"""Messages of median size that a device is assumed to hold in flight, if only the oracle counts them: two received
ahead, and one sent each way."""
RESCORED = 8
"""Plans scored by an oracle that is not the search's own."""
SIMULATED = 200_000
"""Compute actions of all replicas in these plans together; two are scored in any case."""
SEARCHES = 3
"""Largest number of searches if the oracle counts memory that the search does not, such as messages. Each further one
reserves the missing bytes."""
RESERVE = 1.05
"""Reserved bytes ÷ missing bytes."""
CONTINUED = 0.3
"""Share of the budget for a further search, which continues from the previous result."""


@frozen
class SearchResult:
    """The result of a search.

    Args:
        plans: with their predictions: the fastest first, then, if alternatives are requested, those whose fullest
            device holds less than that of every faster plan, by ascending time.
        evaluations: number of evaluated plans.
        stopped: whether a time limit or an interrupt ended the search early.
    """

    plans: tuple[Plan, ...]
    evaluations: int
    stopped: bool = False

    @property
    def best(self) -> Plan:
        """The fastest plan."""
        return self.plans[0]


def confirmed(settings: Sequence[Setting], options: SearchOptions, meter: Meter) -> SearchResult:
    """The best plans of some settings, by the oracle's score; without ``alternatives`` only the fastest.

    Where messages share links, the judge's step times decide if there is a judge (see ``SearchOptions``).

    Raises:
        RequestError: no family supports any setting.
        NothingFits: no plan found fits in memory; the message names the device that exceeds its limit most.
    """
    # The search does not model when parameters are gathered for runs.
    exact = options.oracle is longest_path and all(not part_of_parameters(setting.shard) for setting in settings)
    task = _Task(options, meter, exact)
    if options.oracle is not longest_path:
        settings = [evolve(setting, reserved_messages=MESSAGES) for setting in settings]
    found = task.searched_with_reserve(settings)
    fits = any(scored.rank[0] == 0 for scored in found.scored_plans)
    if not (fits or found.stopped or meter.until_fit or task.exact or meter.exhausted):
        # The search optimised by its own memory model; the shorter search for any plan that fits may find one.
        scout = meter.part(meter.budget, until_fit=True)
        more = evolve(task, meter=scout).searched_with_reserve(settings)
        meter.spent += scout.spent
        found = evolve(found, scored_plans=(*found.scored_plans, *more.scored_plans))
    if not (found.stopped or meter.until_fit or meter.exhausted):
        found = task.with_contention(found)
    return result_of(found.scored_plans, meter.spent, found.stopped)


@frozen
class _Task:
    """The arguments shared by the searches for one result, as in :func:`confirmed`."""

    options: SearchOptions
    meter: Meter
    exact: bool
    """Whether the oracle is the search's own model."""

    def searched_with_reserve(self, settings: Sequence[Setting]) -> "_Found":
        """Search; repeat with reserved memory while the search's best plan fits by its own model and not by the
        oracle's."""
        found = self.searched(settings)
        reserved, meter = (0.0,) * len(settings[0].memory), self.meter
        budget = meter.budget if meter.until_fit else int(CONTINUED * meter.budget)
        for _ in range(0 if self.exact else SEARCHES - 1):
            if found.stopped or not found.misled or meter.exhausted:
                break
            missing = _missing(found.leader, len(reserved))
            reserved = tuple(had + RESERVE * miss for had, miss in zip(reserved, missing, strict=True))
            if any(map(float.__ge__, reserved, map(float, settings[0].memory))):
                break
            meter.budget = meter.spent + budget
            reserving = [evolve(each, reserved=reserved) for each in settings]
            earlier = () if meter.until_fit else _in_settings(found.walks, found.settings, reserving)
            more = self.searched(reserving, earlier)
            found = evolve(more, scored_plans=(*found.scored_plans, *more.scored_plans))
        return found

    def searched(self, settings: Sequence[Setting], earlier: Sequence[Walk] = ()) -> "_Found":
        """Search, and score the best plans with the oracle."""
        walks, stopped = search(settings, self.options, self.meter, self.options.seed, earlier)
        # The oracle never counts less memory: plans that exceed a limit already are not scored, but for the closest.
        scored = [walk for walk in walks if walk.may_fit] or [min(walks, key=lambda walk: walk.excess)]
        leading = scored[0]
        leading.join_backwards()
        first = rescored(scored, self.options.oracle, 1 if self.exact else self._rescored(leading))
        best = best_first(first)[0]
        found = [best]
        if self.options.alternatives or best.rank[0] > 0:
            known = {id(walk): scored for walk, scored in zip(scored, first, strict=False)}
            slower = [walk for walk in frontier(walks) if walk.step_s > leading.step_s]
            found += [known.get(id(walk)) or score_walk(walk, self.options.oracle) for walk in slower]
        misled = leading.excess == 0 and first[0].rank[0] > 0
        return _Found(tuple(found), first[0], misled, stopped, walks, settings)

    def _rescored(self, walk: Walk) -> int:
        """Plans like this one that the oracle scores."""
        return max(min(RESCORED, SIMULATED // (walk.actions * len(walk.setting.replicas))), 2)

    def with_contention(self, found: "_Found") -> "_Found":
        """The result with plans from a search with contention, if messages share links in the best plan."""
        best, judge = best_first(found.scored_plans)[0], self.options.judge
        if (self.exact and judge is None) or best.rank[0] > 0 or not contends(best, judge):
            return found
        settings = [evolve(setting, contended=True) for setting in found.settings]
        walks, stopped = contended(_in_settings(found.walks, found.settings, settings), self.options, self.meter)
        scored_plans = [*found.scored_plans, *rescored(walks, self.options.oracle, self._rescored(walks[0]))]
        if judge is not None:
            scored_plans = [judged(scored, judge) for scored in scored_plans]
        return evolve(found, scored_plans=tuple(scored_plans), stopped=stopped)


def _in_settings(walks: Sequence[Walk], before: Sequence[Setting], now: Sequence[Setting]) -> list[Walk]:
    """The same walks in other settings."""
    other = {id(old): new for old, new in zip(before, now, strict=True)}
    return [evolve(walk, setting=other[id(walk.setting)], best=walk.best.copy()) for walk in walks]


def _missing(scored: ScoredPlan, devices: int) -> list[float]:
    """Bytes that each of the cluster's devices lacks for a plan."""
    plan, missing = scored.plan, [0.0] * devices
    for rank, device in enumerate(plan.mesh.cluster_devices):
        missing[device] = scored.excess[rank % plan.devices]
    return missing


@frozen
class _Found:
    """The result of one search, scored by the oracle.

    Args:
        scored_plans: in no order.
        leader: the best by the search's own model.
        misled: whether the leader fits by the search's model but not by the oracle's.
        stopped: see :class:`SearchResult`.
        walks, settings: of the search.
    """

    scored_plans: tuple[ScoredPlan, ...]
    leader: ScoredPlan
    misled: bool
    stopped: bool
    walks: Sequence[Walk]
    settings: Sequence[Setting]


def result_of(found: Sequence[ScoredPlan], evaluations: int, stopped: bool) -> SearchResult:
    """The fastest of some plans, and their frontier of time and memory. Raises NothingFits if none fits."""
    plans = _descending(found)
    refuse_above(plans[0], evaluations)
    return SearchResult(tuple(predicted(each, evaluations) for each in plans), evaluations, stopped)


def _descending(found: Sequence[ScoredPlan]) -> list[ScoredPlan]:
    """The Pareto frontier of time and memory by the oracle's score, fastest first."""
    ordered = best_first(found)
    fit = (scored for scored in ordered if scored.rank[0] == 0)
    return tradeoff.frontier(fit, lambda scored: scored.rank[1], lambda scored: scored.most_bytes) or ordered[:1]


NOTICEABLE = 0.01
"""Share of the step by which contention has to prolong the best plan for a further search: no plan is faster with
contention than without, so less than that is the most that a further search could gain."""
CONTENDED_SHARE = 1 / 16
"""Evaluations with contention ÷ evaluations without: together they take about as long again."""
LEAST_CONTENDED = 300
"""Smallest number of evaluations."""
STARTS, ALIKE = 16, 3
"""Walks that are annealed with contention, and how many of them may have the same placement."""

CONTENDED_ORDERS = (
    Round(STARTS, ALIKE, 0.3, 0.002, 0.15),
    Round(5, 2, 0.3, 0.002, 0.15),
    Round(2, 2, 0.4, 0.001, 0.15),
)
"""Rounds for cuts and orders."""
CONTENDED_CUTS = (Round(STARTS, ALIKE, 0.5, 0.0, 1.0), Round(4, 2, 0.5, 0.0, 1.0))
"""Rounds for cuts alone, if orders must be a family's; there are none if stages are given, too."""


def contends(scored: ScoredPlan, judge: Oracle | None) -> bool:
    """Whether contention prolongs a plan's step noticeably.

    Args:
        scored: with its oracle's score: that of ``longest_path``, if there is a judge.
        judge: times the step with contention; None if the oracle does.
    """
    plan, costs, cluster = scored.plan, scored.costs, scored.setting.cluster
    own_s = scored.score.step_s
    other_s = (judge or longest_path)(plan, costs, cluster).step_s
    return max(own_s, other_s) > (1 + NOTICEABLE) * min(own_s, other_s)


def contended(walks: Sequence[Walk], options: SearchOptions, meter: Meter) -> tuple[list[Walk], bool]:
    """Continue walks with contention.

    Args:
        walks: of a search, now in settings with contention.
        meter: its number of evaluations determines how many follow; counts them, too.

    Returns:
        The walks, best first, and whether a time limit or an interrupt ended the search early.
    """
    own = meter.part(max(int(CONTENDED_SHARE * meter.budget), LEAST_CONTENDED))
    stopped = False
    if own.most is not None:
        walks = walks[: own.left]
    try:
        evaluate_all(walks)
        own.spend(len(walks))
        joined = [walk.copy() for walk in best_by_placement(list(walks), STARTS, ALIKE)]
        for walk in joined:  # the gradient is sent later, which may be faster on a shared link
            walk.join_backwards()
        walks = [*walks, *joined]
        chosen = best_by_placement(walks, STARTS, ALIKE)
        if options.anneal:
            all_rounds(chosen, CONTENDED_ORDERS, own, options.seed)
        elif any(walk.setting.fixed is None for walk in chosen):
            all_rounds(chosen, CONTENDED_CUTS, own, options.seed)
    except (Stopped, KeyboardInterrupt):
        stopped = True
    meter.spent += own.spent
    return ranked(list(walks)), stopped
