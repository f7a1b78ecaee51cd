"""Rehearsal of plans: steps that change nothing, to choose among plans by measurement and to predict the chosen one.

Stages that run at the same time, with messages between them and many saved tensors, take longer than each stage alone:
they share memory bandwidth and caches, and no prediction models it (10 % on four stages of a GPT over gloo, two workers
on two cores). So candidates are measured. To choose the same one in another run:

1. Candidates are 1F1B, and the plan predicted to gain most over it: among the plans predicted to be about as fast, the
   preferred one for its number of stages (`core/search/suggestions/preference`).
2. They take turns of one step, so that a machine whose speed drifts is equally fast for all. The steps of one turn are
   pairs.
3. After ``LEAST_TURNS`` turns a plan that pairs show to be slower than another is dropped (`core/paired_difference`),
   and so is a plan that costs more memory or stages if its gain is below the noise that all turns together would leave.
   It ends with one plan, after ``TURNS``, or with the budget.
4. Of the remaining plans, the one with less memory wins, then the one with fewer stages, then the simpler schedule. But
   1F1B wins unless pairs show that another plan is faster, or, if that one needs less memory, as fast within
   ``AS_FAST_WITHIN``. So on a machine too loaded to show anything, nothing is chosen that may be slower.
5. That plan is rehearsed alone, as it will run, for its prediction: the typical one of its steps
   (`core/paired_difference.robust_geometric_mean`), at the typical speed of the machine meanwhile
   (`core/drift`), and an interval for it (`planning/interval`). The times of programs are those of its steps, and so
   are the rates of its copies to the host and back (`planning/rehearsed_copies`), and the times of what its replicas
   sum and gather (`planning/rehearsed_collectives`). With replicas each of these steps is followed by one in which
   stand-ins of the optimizers step (`optimizer/stand_in`), from which the prediction is then computed: on ranks that
   share cores, the time of an optimizer depends on what the others compute and send meanwhile.

If the budget has no time for 2 to 4, 1F1B is rehearsed alone, and a line reports which comparison needs more time. If
there is no time for 5 either, as on a loaded machine, the prediction is that of the profiled stages, without an
interval.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from attrs import define, evolve, field

from ..core.cluster.mesh import least_by_position
from ..core.drift import steady_times
from ..core.paired_difference import difference, robust_geometric_mean
from ..core.plan.plan import Plan
from ..core.plan.sharding import shards
from ..core.search import Oracle
from ..core.search.problem.score import with_costs
from ..core.search.suggestions.preference import preference, worth_rehearsing
from .pipeline import Pipeline
from .planning.automatic import LEAST_TURNS, PLAIN, Planning, step_s
from .planning.interval import with_interval
from .planning.rehearsed import Rehearsal, length_ratio, rehearsed_profile, times_scaled, with_optimizer_seconds
from .planning.rehearsed_collectives import collective_seconds, with_collective_seconds
from .planning.rehearsed_copies import copy_rates, scaled, with_copy_rates
from .profile.reference_workload import passes_around

CANDIDATES = 2
"""The largest number of plans that are measured against each other."""
TURNS = 8
"""The largest number of turns."""
ERROR = 1 / 16
"""The largest probability of dropping a plan that is not slower: the smallest that four turns can show."""
AS_FAST_WITHIN = 0.02
"""Share of a step by which a plan that needs less memory than 1F1B may be slower."""
STEPS_ALONE, STEPS_IN_ALL = 2, 8
"""Rehearsed steps of the chosen plan if there is time: at least ``STEPS_ALONE`` without other candidates, and at least
``STEPS_IN_ALL`` with those in turns. It has one at least if anything is rehearsed: its parts show the noise."""
TYPICAL = 0.5
"""Quantile of a program's times over steps that its prediction uses."""


@define(eq=False)
class Candidate:
    """A plan that is ready to run, and its rehearsed steps.

    Args:
        pipe: its pipeline.
        oracle: predicts a step.
        batch: a whole batch.
        rehearsals: its rehearsed steps, turn by turn.
        given_cluster: whether the user gave the cluster, whose rates are then not measured.
    """

    pipe: Pipeline
    oracle: Oracle
    batch: Any
    rehearsals: list[Rehearsal] = field(factory=list)
    given_cluster: bool = False

    def rehearse(self, steps: int, warm_up: int = 0, update: bool = False) -> None:
        """Rehearse more steps, after some that are not recorded; arguments as of `Pipeline.rehearse`."""
        self.rehearsals += self.pipe.rehearse(self.batch, steps, warm_up, update)

    @property
    def times(self) -> list[float]:
        """The times of its steps, in seconds."""
        return [one.step_s for one in self.rehearsals]

    @property
    def steady(self) -> list[float]:
        """The times that its steps would have taken at the typical speed of the machine, in seconds."""
        return steady_times(self.times, self.readings)

    @property
    def readings(self) -> list[float]:
        """The reference workload around each of its steps, in seconds."""
        return [one.reference_s for one in self.rehearsals]

    def faster_than(self, other: "Candidate") -> list[float]:
        """For each turn the logarithm of the other's time ÷ this one's: above 0 if this one is faster."""
        return [math.log(b / a) for a, b in zip(self.times, other.times, strict=False)]

    def plan(self) -> Plan:
        """The plan, with a prediction from its rehearsed steps. All ranks call this together."""
        plan = self.pipe.rank_plan
        assert plan.prediction is not None
        rehearsed_s = robust_geometric_mean(self.steady)
        pairs = [(one, one.updated) for one in self.rehearsals if one.updated is not None]
        seen = [updated for _, updated in pairs] or self.rehearsals
        steps_s = [rehearsed_s * updated.step_s / one.step_s for one, updated in pairs] or self.steady
        costs = rehearsed_profile([(plan, plan.prediction.costs, seen)], TYPICAL).of(plan)
        if pairs:
            costs = with_optimizer_seconds(plan, costs, [one.trace for one in seen], TYPICAL)
        measured = [] if self.given_cluster else [one.trace for one in seen]
        costs = with_collective_seconds(plan, costs, collective_seconds(measured, TYPICAL))
        rates = copy_rates(measured, TYPICAL)
        ratio = length_ratio(with_copy_rates(plan, rates), costs, steps_s, self.oracle, updated=bool(pairs))
        costs = times_scaled(costs, ratio)
        if pairs:
            costs = tuple(evolve(cost, optimizer_s=cost.optimizer_s * ratio) for cost in costs)
        plan = with_costs(with_copy_rates(plan, scaled(rates, ratio)), costs, self.oracle)
        again = self.pipe.rehearses(self.batch)
        return with_interval(plan, self.times, self.readings, rehearsed_s if again else None)


def best_rehearsed(planning: Planning, build: Callable[[Plan], Pipeline], batch: Any) -> Pipeline:
    """Plan and rehearse. Returns the pipeline of the chosen plan, with a prediction from its rehearsals.

    Args:
        planning: the request.
        build: builds the pipeline of a plan.
        batch: a whole batch of real data.
    """
    plans = planning.plans()
    order = preference([family.name for family in planning.options.families])
    plain = planning.plain(plans)
    wanted = worth_rehearsing(plans, plain, order, CANDIDATES)
    if plain and len(wanted) > 1:  # each runs once as a warm-up
        turns_s = (1 + LEAST_TURNS) * sum(map(step_s, wanted))
        if not planning.budget.allows(_comparison(wanted, plain[0], turns_s), turns_s):
            wanted = plain
    least_s = 2 * max(map(step_s, wanted))  # one to warm up
    if not planning.budget.allows_least(f"rehearsing, about {least_s:.2g} s", least_s):
        return build((plain or wanted)[0])
    given = planning.options.cluster is not None
    candidates = [Candidate(build(plan), planning.options.oracle, batch, given_cluster=given) for plan in wanted]
    names = " and ".join(f"{plan.schedule} ({len(plan.stages)} stages)" for plan in wanted)
    planning.report(f"rehearsing {names}")
    for candidate in candidates:
        candidate.rehearse(0, warm_up=1)
    best = candidates[0] if len(candidates) == 1 else winner(_in_turns(planning, candidates), PLAIN)
    planning.report(f"rehearsing {best.pipe.rank_plan.schedule} alone")
    wanted_steps = max(STEPS_ALONE, STEPS_IN_ALL - len(best.rehearsals))
    # One step shows how long it takes on this machine now; then the time that is left is divided by it.
    first = 0 if best.rehearsals else 1
    best.rehearse(first)
    each_s = statistics.median(best.times)
    each_s += passes_around(each_s) * statistics.median(best.readings)
    update = has_room_for_stand_ins(best.pipe.rank_plan)
    each_s *= 2 if update else 1  # each step is followed by one with an update
    more = planning.budget.repeats("further rehearsals", each_s, wanted_steps - first, least=0)
    best.rehearse(more, warm_up=1 if update and more else 0, update=update and more > 0)
    best.pipe.rank_plan = best.plan()
    return best.pipe


def has_room_for_stand_ins(plan: Plan) -> bool:
    """Whether steps with stand-ins of the optimizers are rehearsed, too.

    They are where replicas sum and gather while others step, if every device's memory has room for copies of what its
    optimizers step, in addition to the predicted peak: it includes the optimizers' state, which stand-ins have instead.
    """
    costs, data = plan.predicted.costs, plan.mesh.data
    if data == 1 or all(cost.optimizer_s == 0 for cost in costs):
        return False
    limits = least_by_position(
        [float(each.memory_bytes) for each in plan.predicted.cluster.devices], plan.mesh.replicas
    )
    copies = [0.0] * plan.devices
    for stage in plan.stages:
        copies[stage.device] += costs[stage.index].gradient_bytes / (data if shards(plan, stage.index) else 1)
    peaks = plan.predicted.peak_memory_bytes
    return all(peak + size <= limit for peak, size, limit in zip(peaks, copies, limits, strict=True))


def _comparison(wanted: Sequence[Plan], plain: Plan, turns_s: float) -> str:
    """The comparison that the budget has no time for, for the report."""
    others = [plan for plan in wanted if plan.schedule != plain.schedule]
    named = " and ".join(f"{each.schedule} (predicted {step_s(plain) / step_s(each) - 1:+.1%})" for each in others)
    return f"comparing {plain.schedule} with {named}, about {turns_s:.0f} s"


def _in_turns(planning: Planning, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Rehearse in turns until one is left, or noise exceeds the possible gain. Returns those left, in order."""
    left = list(candidates)
    for turn in range(TURNS):
        if len(left) == 1:
            break
        turn_s = sum(candidate.times[-1] for candidate in left) if turn else 0.0
        if turn and not planning.budget.allows("rehearsing in turns", turn_s):
            break
        planning.report("rehearsing in turns", turn, TURNS)
        for place in range(len(left)):
            left[(turn + place) % len(left)].rehearse(1)
        if turn + 1 >= LEAST_TURNS:
            left = undecided(left, PLAIN)
    return left


def undecided(candidates: Sequence[Candidate], plain: str) -> list[Candidate]:
    """The candidates between which further turns may decide.

    Dropped are a candidate that is shown to be slower than another; one that costs more than the plain one, if its gain
    is below the noise that all turns would leave; one that costs less, if they would not show it to be as fast; and the
    plain one, if one that costs less is shown to be as fast.

    Args:
        candidates: in order of preference, all with the same number of turns.
        plain: name of the schedule that others are compared with; if no candidate has it, the first one is.
    """
    left = [
        b for b in candidates
        if not any(a is not b and difference(a.faster_than(b), ERROR).low > 0 for a in candidates)
    ]  # fmt: skip
    known = next((each for each in left if each.pipe.rank_plan.schedule == plain), left[0])
    place, kept = left.index(known), list[Candidate]()
    for number, each in enumerate(left):
        gain = difference(each.faster_than(known), ERROR)
        needed = -AS_FAST_WITHIN if number < place else 0.0
        noise = (gain.estimate - gain.low) * math.sqrt(len(each.rehearsals) / TURNS)
        if each is known or gain.estimate - noise > needed:
            kept.append(each)
        if number < place and gain.low > needed:
            return kept
    return kept


def winner(candidates: Sequence[Candidate], plain: str) -> Candidate:
    """The chosen candidate (4 of the module).

    Args:
        candidates: in order of preference, all with the same number of turns.
        plain: name of the schedule that others must be faster than.
    """
    place = next((i for i, each in enumerate(candidates) if each.pipe.rank_plan.schedule == plain), None)
    eligible = list(candidates)
    if place is not None:
        known = candidates[place]
        cheaper, dearer = candidates[:place], candidates[place + 1 :]
        eligible = [
            *(each for each in cheaper if difference(each.faster_than(known), ERROR).low > -AS_FAST_WITHIN),
            known,
            *(each for each in dearer if difference(each.faster_than(known), ERROR).low > 0),
        ]
    beaten = {
        a for a in eligible for b in eligible if a is not b and difference(b.faster_than(a), ERROR).low > 0
    }  # fmt: skip
    return next(each for each in eligible if each not in beaten)
