"""Plans that offload: searched with more memory than there is, then brought within it by copies to the host.

The order search does not model copies: it runs with a higher limit for saved tensors. For each of its best orders, fast
ones and such that hold little, the choice of what leaves (``core/offload``) finds the least with which every device
fits, and the oracle scores the result. So an order that holds little, stages that recompute and copies to the host
compete under one limit. Named schedules on cuts of their own are among these orders: with copies on shared links an
annealed order may be slower than they are. Where no order is short of memory nothing leaves, and nothing further is
searched.
"""

from collections.abc import Iterator, Mapping, Sequence

from attrs import evolve, frozen

from ..cluster.routing import path_rate, reverse
from ..costs.costs import StageCosts
from ..errors import InfeasibleError, RequestError
from ..offload.choice import Offloadable, Picks, of_stages, within
from ..offload.plan_offload import copy_queues, graph_storages, offloadable, picks_of, with_offload
from ..plan.memory_policy import Storage
from ..plan.plan import Plan
from ..policies.sharding import replica_costs
from ..schedules.problem import resident
from ..timing.coding import INFINITY
from ..validation.host_memory import check_host_memory
from .annealing.search import search
from .annealing.walk import Walk, best_by_placement, frontier
from .confirm import SearchResult, confirmed, result_of
from .finalize import ScoredPlan, best_first, draft, judged, limits_of, score_plan
from .problem.meter import Meter
from .problem.setting import Setting
from .search_options import SearchOptions
from .suggestions.infeasible import NothingFits
from .suggestions.unlimited_memory import holds_all

SHARE, PUBLISHED = 0.3, 0.05
"""Share of the budget for each further search, and for the one of published orders: faster ones may leave no time for
copies."""
LEAVING = (0.8, 0.4)
"""Shares of what the links carry that are assumed to leave in the further searches: they get as much more memory."""
FASTEST = 6
"""Walks of each search to which copies are added because they are fast; in addition to those that hold little."""
ALIKE = 2
"""Walks of each family to which copies are added."""
TIGHTER = 3
"""How often the limits are lowered by what the oracle counts in addition."""
GAIN = 0.004
"""Share of a step that offload must gain over a plan without it."""


@frozen
class OffloadSearch:
    """A search with offload; arguments and errors as in ``confirmed``."""

    settings: Sequence[Setting]
    options: SearchOptions
    meter: Meter

    def result(self) -> SearchResult:
        """The plans found."""
        return self._automatic() if self.options.offload == "auto" else self._as_asked()

    def _as_asked(self) -> SearchResult:
        """Plans in which everything, or the given shares, or what the schedule says, leaves."""
        for device in (device for replica in self.settings[0].replicas for device in replica):
            self.settings[0].cluster.host_path(device)  # refused if there is none
        found: list[ScoredPlan] = []
        refused: RequestError | None = None
        walks, stopped = self._searched(INFINITY, 1.0, self.options)
        for walk in _chosen(walks):
            base = _Base.of(walk, self.options.storages)
            try:
                own, wanted = self.options.offload == "none", self.options.offload
                pick = of_stages(dict(walk.offload)) if own else picks_of(wanted, len(base.plan.stages))
            except RequestError as error:  # it has fewer stages than were named
                refused = error
                continue
            found.append(self._scored(base, pick))
        best = next(iter(best_first(found)), None)
        if best is not None:
            check_host_memory(best.plan, best.plan.mesh.arrange(best.setting.cluster))
        if refused is not None and not found:
            raise refused
        return result_of(self._wanted_of(found), self.meter.spent, stopped)

    def _automatic(self) -> SearchResult:
        """Without offload, and where memory is short also with it; offload only where it gains something.

        Of schedules that offload by themselves only the orders are used, and without copies only if no others are
        given.
        """
        families = resident(self.options.families) or self.options.families
        plain: SearchResult | None = None
        nothing: NothingFits | None = None
        try:
            plain = confirmed(self.settings, evolve(self.options, families=families), self.meter)
        except NothingFits as error:
            nothing = error
        no_host = all(_load(setting) == INFINITY for setting in self.settings)
        if plain is not None and (plain.stopped or no_host or not self._short_of_memory(plain.best)):
            return plain
        if nothing is not None and no_host:
            raise nothing
        enough_s = INFINITY if plain is None else (1 - GAIN) * self._step_s(plain.best)
        candidates, stopped = self._faster_than(enough_s)
        best = next((each for each in best_first(candidates) if each.rank[0] <= 0), None)
        if best is None and nothing is not None:
            raise nothing
        if plain is not None and (best is None or best.rank[1] > enough_s):
            return evolve(plain, evaluations=self.meter.spent)
        return result_of(self._wanted_of(candidates), self.meter.spent, stopped)

    def _step_s(self, plan: Plan) -> float:
        """The step of a predicted plan, by the judge if there is one."""
        if self.options.judge is None:
            return plan.predicted.step_s
        return self.options.judge(evolve(plan, prediction=None), plan.predicted.costs, plan.predicted.cluster).step_s

    def _scored(self, base: "_Base", pick: Picks) -> ScoredPlan:
        """A plan with what is picked, by oracle and judge: the faster of copies planned for free and for fully used
        links."""
        shared = any(len(devices) > 1 for devices, _ in base.task.links.groups)
        tasks = (base.task, base.task.slowed) if shared else (base.task,)
        plans = (with_offload(base.plan, task, pick) for task in tasks)
        found = [score_plan(base.setting, plan, base.costs, self.options.oracle) for plan in plans]
        judge = self.options.judge
        if judge is not None:
            found = [judged(each, judge) if each.rank[0] <= 0 else each for each in found]
        return best_first(found)[0]

    def _faster_than(self, enough_s: float) -> tuple[list[ScoredPlan], bool]:
        """Plans with copies whose orders alone take less than ``enough_s``, and whether the search was ended."""
        candidates: list[ScoredPlan] = []
        stopped = False
        searches = [(leaving, SHARE, self.options) for leaving in LEAVING]
        if self.options.anneal:
            searches.append((LEAVING[0], PUBLISHED, evolve(self.options, anneal=False)))
        for leaving, share, options in searches:
            walks, stopped = self._searched(leaving, share, options)
            for walk in sorted(_chosen(walks), key=lambda walk: walk.step_s):
                if walk.step_s >= enough_s:
                    break
                found = list(self._within_limits(walk))
                candidates += found
                enough_s = min([enough_s, *(each.rank[1] for each in found if each.rank[0] <= 0)])
            if stopped or self.meter.exhausted:
                break
        return candidates, stopped

    def _wanted_of(self, found: Sequence[ScoredPlan]) -> Sequence[ScoredPlan]:
        """All candidates, or without alternatives the best one."""
        return found if self.options.alternatives else best_first(found)[:1]

    def _short_of_memory(self, best: Plan) -> bool:
        """Whether a device recomputes, or cannot hold all microbatches at once."""
        limits = limits_of(self.settings[0], best)
        return bool(best.memory.recompute) or not all(map(holds_all, [best] * len(limits), range(len(limits)), limits))

    def _searched(self, leaving: float, share: float, options: SearchOptions) -> tuple[list[Walk], bool]:
        """Walks of a search in which saved tensors may take more memory.

        Args:
            leaving: share of what the links carry that is assumed to leave; infinite for any amount.
            share: of the budget.
        """
        meter = self.meter
        further = meter.part(max(int(share * meter.budget), 1), until_fit=meter.until_fit)
        settings = [_with_more_memory(setting, leaving) for setting in self.settings]
        walks, stopped = search(settings, options, further, options.seed)
        meter.spent += further.spent
        return walks, stopped

    def _within_limits(self, walk: Walk) -> Iterator[ScoredPlan]:
        """A walk with the least copies with which it fits, and with those of its schedule if these wait for copies."""
        base = _Base.of(walk, self.options.storages)
        held = replica_costs(base.plan, base.costs)
        limits = [
            limit - sum(held[stage.index].state_bytes for stage in base.plan.stages_on(device))
            for device, limit in enumerate(base.limits)
        ]
        for _ in range(TIGHTER):
            held_bytes = base.task.peaks_within(limits)
            if held_bytes is None:
                break
            found = self._scored(base, within(limits))
            if not base.fits_hosts(found.plan):
                return
            yield found
            if found.rank[0] <= 0 and found.rank[1] <= (1 + GAIN) * walk.step_s:
                return
            if found.rank[0] <= 0:
                break
            # Lowered from what the device holds: a storage is large, so that this may be far below its limit already.
            limits = [
                own - 1.02 * over if over else limit
                for limit, own, over in zip(limits, held_bytes, found.excess, strict=True)
            ]
        if walk.offload:
            found = self._scored(base, of_stages(dict(walk.offload)))
            if base.fits_hosts(found.plan):
                yield found


@frozen
class _Base:
    """A walk's plan without offload, and the times of its orders."""

    setting: Setting
    plan: Plan
    costs: tuple[StageCosts, ...]
    limits: tuple[float, ...]
    task: Offloadable

    @classmethod
    def of(cls, walk: Walk, known: Mapping[tuple[tuple[str, ...], ...], Sequence[Sequence[Storage]]]) -> "_Base":
        walk.join_backwards()  # it holds less, and the step is not longer
        plan, costs = draft(walk)
        setting, stages = walk.setting, tuple(tuple(stage.nodes) for stage in plan.stages)
        plan = evolve(plan, memory=evolve(plan.memory, host_copy_queues=copy_queues(plan, setting.cluster)))
        storages = known[stages] if stages in known else graph_storages(setting.graph, stages, costs)
        return cls(setting, plan, costs, limits_of(setting, plan), offloadable(plan, costs, setting.cluster, storages))

    def fits_hosts(self, plan: Plan) -> bool:
        """Whether what a plan offloads fits the memory of its hosts."""
        try:
            check_host_memory(plan, plan.mesh.arrange(self.setting.cluster))
        except InfeasibleError:
            return False
        return True


def _chosen(walks: Sequence[Walk]) -> list[Walk]:
    """The walks to which copies are added: fast ones, the fastest of each family (of those that offload, of each
    schedule), and the frontier of time and memory."""
    alike: dict[str, list[Walk]] = {}
    for walk in walks:
        alike.setdefault(walk.schedule if walk.offload else walk.schedule.partition("(")[0], []).append(walk)
    fastest = [walk for own in alike.values() for walk in own[:ALIKE]]
    found = [*best_by_placement(list(walks), FASTEST, 2), *fastest, *frontier(list(walks))]
    return list({id(walk): walk for walk in found}.values())


def _with_more_memory(setting: Setting, leaving: float) -> Setting:
    """The setting with memory for the saved tensors that are assumed to leave.

    Of what a device may hold, ``1 − s`` stays if the share s leaves: so s/(1 − s) of it more may be saved.
    """
    saved = sum(node.saved_bytes for node in setting.graph.nodes)
    everything = setting.microbatches * float(saved)
    share = leaving if leaving == INFINITY else min(leaving / max(_load(setting), 1e-9), leaving)
    more = everything if share >= 1 else share / (1 - share) * max(setting.memory)
    more = min(more, everything)
    return evolve(setting, reserved=tuple(-more for _ in setting.memory))


def _load(setting: Setting) -> float:
    """k of PipeOffload: the time of a round trip of all saved tensors ÷ the time of the work that they are saved for.

    Of the slowest link; infinite where a device reaches no host.
    """
    nodes = setting.graph.nodes
    work = sum(node.forward_s + node.backward_input_s + node.backward_weight_s for node in nodes)
    saved = sum(node.saved_bytes for node in nodes)
    devices = {device for replica in setting.replicas for device in replica}
    try:
        paths = [setting.cluster.host_path(device) for device in devices]
    except RequestError:
        return INFINITY
    slowest_s = max(saved / path_rate(path) + saved / path_rate(reverse(path)) for path in paths)
    return slowest_s / work if work else INFINITY
