"""Rehearsing plans: steps that change nothing, to choose among plans by measurement and to predict the one chosen.

Stages that run at the same time, with messages between them and saved tensors piling up, take longer than each alone:
they share memory bandwidth and caches, and no prediction has it right (10 % on four stages of a GPT over gloo, two
workers on two cores). So candidates are measured, and so that another run chooses the same one:

1. Candidates are 1F1B, and the plan predicted to gain most over it: of the plans that are preferred for their number
   of stages among those predicted to be about as fast (`core/search/suggestions/preference`).
2. They take turns of one step, so that a machine whose speed drifts is as fast for one as for the next. Steps of one
   turn are pairs.
3. After ``LEAST_TURNS`` turns whatever pairs show to be slower than another is left out (`core/paired`), and so is a
   dearer plan whose gain is below the noise that all turns together would leave. It ends with one plan, or after
   ``TURNS``, or with the budget.
4. Of what is left, the plan with less memory stays, then the one with fewer stages, then the simpler schedule. But it
   is 1F1B unless pairs show that another one is faster, or, where that needs less memory, as fast to ``AS_FAST``: on a
   machine too loaded to show anything, nothing is chosen that may be slower.
5. That one is rehearsed alone, as it will run, for its prediction: the typical step of those that were seen of it
   (`core/paired.robust_geometric_mean`), each at the speed that the machine had around it, and an interval for it
   (`with_interval`).

Where the budget has no time for 2 to 4, 1F1B is rehearsed alone, and a line says what more time would compare it with.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from attrs import define, evolve, field

from ..core.paired import difference, robust_geometric_mean
from ..core.plan.plan import Plan
from ..core.search import Oracle
from ..core.search.problem.score import with_costs
from ..core.search.suggestions.preference import preference, worth_rehearsing
from .pipeline import Pipeline
from .planning.automatic import LEAST_TURNS, PLAIN, Planning, step_s
from .planning.rehearsed import Rehearsal, length_ratio, rehearsed_profile, times_scaled

CANDIDATES = 2
"""Plans that are measured against each other, at most."""
TURNS = 8
"""Turns of candidates, at most."""
ERROR = 1 / 16
"""Most probability of leaving a plan out that is not slower: what four turns can show."""
AS_FAST = 0.02
"""Share of a step by which a plan that needs less memory than 1F1B may be slower."""
ALONE, SEEN, ENOUGH = 2, 8, 5
"""Steps of the plan chosen, without other candidates in turn: the first two numbers at least and in all, where there is
time; the third in all whatever the time: with fewer, an interval is twice as wide as with eight."""
LATER = 2
"""How many times as many readings of the reference workload as steps are rehearsed a later comparison takes."""
LEVEL = 0.9
"""Probability that the typical step of training lies within the predicted interval."""
FEWEST = 5
"""Steps that an interval needs: bounds from four are twice as far apart as from eight."""
STUDENT = (2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753)
"""Quantiles of Student's t at ``(1 + LEVEL) / 2``, for as many values as ``FEWEST`` and each one more."""
TYPICAL = 0.5
"""Quantile of a program's times over steps, for predicting."""


@define(eq=False)
class Candidate:
    """A plan that is ready to run, and what was seen of it, turn by turn."""

    pipe: Pipeline
    oracle: Oracle
    batch: Any
    seen: list[Rehearsal] = field(factory=list)

    def rehearse(self, steps: int, skip: int = 0) -> None:
        self.seen += self.pipe.rehearse(self.batch, steps, skip)

    @property
    def times(self) -> list[float]:
        """What its steps took, in seconds."""
        return [one.step_s for one in self.seen]

    @property
    def steady(self) -> list[float]:
        """What its steps would have taken, had the machine been as fast around each as it typically was."""
        reference = robust_geometric_mean([one.reference_s for one in self.seen])
        return [one.step_s * reference / one.reference_s for one in self.seen]

    def faster_than(self, other: "Candidate") -> list[float]:
        """By how much each turn was, as logarithms of ratios: above 0 this one is faster."""
        return [math.log(b / a) for a, b in zip(self.times, other.times, strict=False)]

    def plan(self) -> Plan:
        """The plan, predicted from what was seen."""
        plan = self.pipe.plan
        assert plan.prediction is not None
        profile = rehearsed_profile([(plan, plan.prediction.costs, self.seen)], TYPICAL)
        costs = profile.of(plan)
        ratio = length_ratio(plan, costs, self.steady, self.oracle)
        return with_costs(plan, times_scaled(costs, ratio), self.oracle)


def best_rehearsed(planning: Planning, ready: Callable[[Plan], Pipeline], batch: Any) -> Pipeline:
    """Plan and rehearse; the pipeline of the plan that stays, with a prediction from its rehearsals.

    Args:
        planning: makes plans.
        ready: makes a pipeline of one.
        batch: a real one.
    """
    plans = planning.plans()
    order = preference([family.name for family in planning.options.families])
    plain = planning.plain(plans)
    wanted = worth_rehearsing(plans, plain, order, CANDIDATES)
    if plain and len(wanted) > 1:  # each runs once to warm up
        turns_s = (1 + LEAST_TURNS) * sum(map(step_s, wanted))
        if not planning.budget.allows(_comparison(wanted, plain[0], turns_s), turns_s):
            wanted = plain
    candidates = [Candidate(ready(plan), planning.options.oracle, batch) for plan in wanted]
    names = " and ".join(f"{plan.schedule} ({len(plan.stages)} stages)" for plan in wanted)
    planning.report(f"rehearsing {names}")
    for candidate in candidates:
        candidate.rehearse(0, skip=1)
    best = candidates[0] if len(candidates) == 1 else winner(_in_turns(planning, candidates), PLAIN)
    planning.report(f"rehearsing {best.pipe.plan.schedule} alone")
    each_s = statistics.median(best.times) if best.times else step_s(best.pipe.plan)
    wanted_steps = max(ALONE, SEEN - len(best.seen))
    least = max(0, ENOUGH - len(best.seen))
    best.rehearse(planning.budget.repeats("further rehearsals", each_s, wanted_steps, least))
    best.pipe.plan = with_interval(best.plan(), best.steady, [one.reference_s for one in best.seen])
    return best.pipe


def _comparison(wanted: Sequence[Plan], plain: Plan, turns_s: float) -> str:
    """What the budget has no time for, in the words of the report."""
    others = [plan for plan in wanted if plan.schedule != plain.schedule]
    named = " and ".join(f"{each.schedule} (predicted {step_s(plain) / step_s(each) - 1:+.1%})" for each in others)
    return f"comparing {plain.schedule} with {named}, about {turns_s:.0f} s"


def _in_turns(planning: Planning, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Rehearse in turns until one is left, or noise exceeds what is to gain; those left, as they were sorted."""
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
    """Candidates between which further turns may decide.

    Left out is what is shown to be slower than another one; a dearer plan whose gain over the plain one is below the
    noise that all turns would leave, and a cheaper one that they would not show to be as fast; and the plain one where
    a cheaper one is shown to be.

    Args:
        candidates: the preferred ones first; each with as many turns.
        plain: name of the schedule that others are measured against; without it the first one is.
    """
    left = [
        b for b in candidates
        if not any(a is not b and difference(a.faster_than(b), ERROR).low > 0 for a in candidates)
    ]  # fmt: skip
    known = next((each for each in left if each.pipe.plan.schedule == plain), left[0])
    place, kept = left.index(known), list[Candidate]()
    for number, each in enumerate(left):
        gain = difference(each.faster_than(known), ERROR)
        needed = -AS_FAST if number < place else 0.0
        noise = (gain.estimate - gain.low) * math.sqrt(len(each.seen) / TURNS)
        if each is known or gain.estimate - noise > needed:
            kept.append(each)
        if number < place and gain.low > needed:
            return kept
    return kept


def winner(candidates: Sequence[Candidate], plain: str) -> Candidate:
    """The candidate that stays (4 of the module).

    Args:
        candidates: the preferred ones first; each with as many turns.
        plain: name of the schedule that others have to be faster than.
    """
    place = next((i for i, each in enumerate(candidates) if each.pipe.plan.schedule == plain), None)
    eligible = list(candidates)
    if place is not None:
        known = candidates[place]
        cheaper, dearer = candidates[:place], candidates[place + 1 :]
        eligible = [
            *(each for each in cheaper if difference(each.faster_than(known), ERROR).low > -AS_FAST),
            known,
            *(each for each in dearer if difference(each.faster_than(known), ERROR).low > 0),
        ]
    beaten = {
        a for a in eligible for b in eligible if a is not b and difference(b.faster_than(a), ERROR).low > 0
    }  # fmt: skip
    return next(each for each in eligible if each not in beaten)


def with_interval(plan: Plan, steps_s: Sequence[float], speeds: Sequence[float]) -> Plan:
    """The plan with the interval that noise implies for the typical step of training, and the machine's speed.

    A step is predicted as the typical one of those that were rehearsed, each at the speed that the reference workload
    showed around it. How far that is from the typical one of all steps is known from these alone: by the bounds of
    Student's t on their logarithms, which are of use from five steps on. Ranks alone (`core/paired`) bound five by the
    outermost two. More steps narrow them. The noise of the readings is in these steps already: each was divided by its
    own. A later step is compared at the speed that later readings show, of which there are more (``LATER``), and whose
    noise is at most what steps and readings vary by now. The two are independent, so that their squares are added. The
    spread of single steps is no part of it: it is not what the typical step varies by.

    Args:
        plan: with its prediction.
        steps_s: of its rehearsed steps at the speed that the prediction is for, in seconds.
        speeds: seconds of the reference workload around each of them.

    Returns:
        The plan; without an interval where there are fewer than five steps or readings.
    """
    assert plan.prediction is not None
    reference = robust_geometric_mean(speeds)
    below, above = _reach(steps_s)
    later = min(max(_reach(speeds)), max(below, above)) / math.sqrt(LATER)
    if min(len(steps_s), len(speeds)) < FEWEST:
        return evolve(plan, prediction=evolve(plan.prediction, reference_s=reference))
    predicted_s = plan.prediction.step_s
    low, high = (math.hypot(reach, later) for reach in (below, above))
    interval = predicted_s * math.exp(-low), predicted_s * math.exp(high)
    return evolve(plan, prediction=evolve(plan.prediction, interval_s=interval, reference_s=reference))


def _reach(values: Sequence[float]) -> tuple[float, float]:
    """How far the typical one of all values may be below and above that of some, as logarithms, with an error of half
    of what ``LEVEL`` leaves for each; infinite for fewer than ``FEWEST``."""
    if len(values) < FEWEST:
        return math.inf, math.inf
    logs = [math.log(value) for value in values]
    mean, estimate = statistics.fmean(logs), math.log(robust_geometric_mean(values))
    quantile = STUDENT[min(len(logs), FEWEST + len(STUDENT) - 1) - FEWEST]
    reach = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return max(estimate - mean + reach, 0.0), max(mean + reach - estimate, 0.0)
