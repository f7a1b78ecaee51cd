"""Rehearsing plans: steps that change nothing, to learn what stages cost while they run as planned, and to cut better.

Stages that run beside each other, with messages between them and saved tensors piling up, take longer than each alone:
they share memory bandwidth and caches. A rehearsal is the profile that a prediction for this machine should stand on.

1. For each number of stages a device, the plan predicted to be fastest is rehearsed, if it is not far from the best;
   its stages' times correct those of its operators, another cut may follow, and that one is rehearsed too (``RECUTS``
   times).
2. The plans left take turns, so that a machine whose speed drifts is as fast for one as for the next.
   The one whose steps were the fastest stays: what more messages do to those who compute beside them is measured, and
   no prediction has it right (10 % on four stages of a GPT over gloo, two workers on two cores).

Over steps, cuts and the choice look at the lower quartile: a busy neighbour of the machine slows down one program or
another for a while, and a stage that met one must not look heavier. The prediction looks at the median.
"""

from collections.abc import Callable
from typing import Any

import numpy
from attrs import define, field

from ..core.graph import OpGraph
from ..core.plan import Plan
from ..core.planner import Oracle
from ..core.planner.score import with_costs
from .automatic import Planning, Stages, step_s
from .pipeline import Pipeline
from .rehearsed import Rehearsal, RehearsedProfile, rehearsed_profile

STEPS = 3
"""Steps of a first rehearsal, after one that does not count."""
RECUTS = 2
"""How often a rehearsed plan is cut anew."""
TURNS = 4
"""Further steps of each plan that is left after recutting."""
FAR = 1.1
"""A plan predicted to take more than this many times the fastest is not rehearsed."""
NEAR = 1.05
"""A plan slower than this many times the fastest does not take part in the turns."""
TYPICAL, UNDISTURBED = 0.5, 0.25
"""Quantiles of a program's times over steps: for predicting, and for weighing stages against each other."""


@define(eq=False)
class _Candidate:
    """A plan that is ready to run, and what was seen of it."""

    pipe: Pipeline
    oracle: Oracle
    batch: Any
    seen: list[Rehearsal] = field(factory=list)

    def rehearse(self, steps: int, skip: int = 0) -> None:
        self.seen += self.pipe.rehearse(self.batch, skip + steps)[skip:]

    @property
    def step_s(self) -> float:
        """What a step took, undisturbed."""
        return float(numpy.quantile([one.trace.step_s for one in self.seen], UNDISTURBED))

    def profile(self, quantile: float) -> RehearsedProfile:
        """What was seen."""
        plan = self.pipe.plan
        assert plan.prediction is not None
        return rehearsed_profile([(plan, plan.prediction.costs, self.seen)], quantile)

    def plan(self, quantile: float) -> Plan:
        """The plan, predicted from what was seen."""
        return with_costs(self.pipe.plan, self.profile(quantile).of(self.pipe.plan), self.oracle)


def best_rehearsed(planning: Planning, ready: Callable[[Plan], Pipeline], batch: Any) -> Pipeline:
    """Plan, rehearse, cut anew; the pipeline of the plan that rehearses best, with a prediction from its rehearsals.

    Args:
        planning: makes plans.
        ready: makes a pipeline of one.
        batch: a real one.
    """
    plans, graph = planning.plans()
    candidates: list[_Candidate] = []
    for plan in plans:
        if step_s(plan) <= FAR * min(map(step_s, plans)):
            candidates += _rehearsed(planning, plan, graph, ready, batch)
    planning.report("rehearsing in turns")
    fastest = min(candidate.step_s for candidate in candidates)
    left = [candidate for candidate in candidates if candidate.step_s <= NEAR * fastest]
    for _ in range(TURNS):
        for candidate in left:
            candidate.rehearse(1)
    best = min(left, key=lambda candidate: candidate.step_s)
    best.pipe.plan = best.plan(TYPICAL)
    return best.pipe


def _rehearsed(
    planning: Planning, plan: Plan, graph: OpGraph, ready: Callable[[Plan], Pipeline], batch: Any
) -> list[_Candidate]:
    """The plan rehearsed, and those cut anew on what was seen."""
    found: list[_Candidate] = []
    tried: list[Stages] = []
    for _ in range(1 + RECUTS):
        planning.report("rehearsing")
        found.append(_Candidate(ready(plan), planning.oracle, batch))
        found[-1].rehearse(STEPS, skip=1)
        tried.append(tuple(stage.nodes for stage in plan.stages))
        another = planning.another(plan, found[-1].profile(UNDISTURBED).costs[tried[-1]], graph, tried)
        if another is None:
            break
        plan = another
    return found
