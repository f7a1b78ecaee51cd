"""Changes of a pipeline's plan while it trains: by a contest of plans, and by planning again.

    step ──▶ turn of a candidate ──▶ … ──▶ end of a block: times of all ranks ──▶ next block, or the winner

With ``replan="auto"``, when steps are slower for a while than in the contest that chose the plan, in this run or an
earlier one, another plan is found and compared with the present one:

    fastest of the last 12 steps ──▶ 10 % slower than recorded? ──▶ a plan for the present speeds ──▶ contest with it
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ...core.errors import RequestError
from ...core.logs import LOGGER
from ...core.plan.plan import Plan
from ..checkpoint.checkpoints import Checkpoints
from ..devices.compute import finished_s
from ..engine.step_data import StepOptions
from ..planning.contest import Candidate, Contest, Turn, arrangement
from ..trainer import Trainer
from .replanner import Replanner

WINDOW = 12
"""Steps whose fastest one counts: a short disturbance does not slow all of them."""
SLOWER, FEWEST = 0.1, 6
"""Share by which it must be slower than before, and the fewest of these steps that have a size of before."""
LONGEST = 64
"""Largest number of windows between two attempts that found nothing better."""

Train = Callable[[Any, StepOptions], Tensor]


class TimedSteps:
    """Trains on batches, and times the steps; a step has several batches if gradients wait for an update.

    Attributes:
        turns: the steps of this process since the last call of `agreed`.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self.turns = trainer, list[Turn]()
        self._seconds, self._size, self._capture_s = 0.0, 0, 0.0

    def begins(self) -> bool:
        """Whether the next batch begins a step. A step that failed counts as one whose time says nothing."""
        if self._trainer.state.accumulated is not None:
            return False
        if self._seconds:
            self.turns.append(Turn(self._seconds, 0))
        self._seconds, self._size, self._capture_s = 0.0, 0, 0.0
        return True

    def train(self, batch: Any, options: StepOptions) -> Tensor:
        """Train on a batch; the loss, as of ``Trainer.train``."""
        trainer = self._trainer
        varying = trainer.prepared.shapes.varying
        start, captured_s = time.perf_counter(), varying.capture_s
        done = trainer.train(batch, options)
        ended = max(finished_s(queue.device) for queue in trainer.queues.values())
        self._seconds, self._size = self._seconds + ended - start, self._size + done.elements
        self._capture_s += varying.capture_s - captured_s
        if options.update:
            self.turns.append(Turn(self._seconds, 0 if self._capture_s else self._size, self._capture_s))
            self._seconds = 0.0
        return done.loss

    def agreed(self) -> list[Turn]:
        """The steps since the last call; the longest time of all ranks counts. All ranks call this together."""
        mine, self.turns = self.turns, []
        return [
            Turn(
                max(turn.seconds for turn in same),
                max(turn.size for turn in same) * all(turn.size for turn in same),
                max(turn.capture_s for turn in same),
            )
            for same in zip(*self._trainer.team.exchange().gather(mine), strict=True)
        ]


class PlanChanges:
    """Trains by plans that it chooses, and moves stages to them. All ranks call its methods together.

    Args:
        moved: called after stages have moved.

    Attributes:
        contest: the plans that the first steps compare; None if none are compared.
        replanner: plans again; None if that is not possible.
    """

    def __init__(self, trainer: Trainer, checkpoints: Checkpoints, moved: Callable[[], None]) -> None:
        self._trainer, self._checkpoints, self._moved = trainer, checkpoints, moved
        self.contest: Contest | None = None
        self.replanner: Replanner | None = None
        self._timed, self._moved_s = TimedSteps(trainer), 0.0
        self._recorded: Sequence[Turn] | None = None
        self._pause = 1

    @property
    def trains(self) -> Train | None:
        """Trains on a batch by a plan that it chooses, and returns the loss; None if only the present plan runs."""
        return self._train if self._compares or self._recorded is not None else None

    @property
    def _compares(self) -> bool:
        return self.contest is not None and not self.contest.done

    def _train(self, batch: Any, options: StepOptions) -> Tensor:
        self._trainer.refuse_closed()
        if self._timed.begins():
            if self._compares and len(self._timed.turns) == len(self._block):
                self._end_block()
            elif not self._compares and len(self._timed.turns) >= WINDOW * self._pause:
                self._look_at(self._timed.agreed()[-WINDOW:])
            if self._compares:
                self._follow(self._block[len(self._timed.turns)].plan)
        return self._timed.train(batch, options)

    def compare(
        self,
        contest: Contest,
        keep: Callable[[Candidate], None],
        fitted: Callable[[Plan], Plan | None] | None = None,
        rivals: Callable[[Plan], Sequence[Plan]] | None = None,
    ) -> None:
        """Train by the candidates of a contest in turns.

        Args:
            contest: its first plan is the present one.
            keep: called with the winner on every rank.
            fitted: called with a plan before its first turn; returns it with the memory of its programs, or None if it
                does not fit. All ranks call it together.
            rivals: called with the winner of the first plans; returns those that it is compared with next. All ranks
                call it together.
        """
        self.contest, self._keep, self._fitted, self._rivals = contest, keep, fitted, rivals
        self._known = {contest.candidates[0]}
        self._blocks = contest.blocks()
        self._block = self._fitting(next(self._blocks))

    def _end_block(self) -> None:
        """End a block: all ranks learn the times of all, and begin the next block, or end the contest."""
        contest, trainer = self.contest, self._trainer
        assert contest is not None
        took: Sequence[Turn] | None = self._timed.agreed()
        if contest.move_s is not None:
            contest.move_s = max(trainer.team.exchange().gather(self._moved_s)) or contest.move_s
        while True:
            try:
                self._block = self._fitting(self._blocks.send(took))
            except StopIteration:
                assert contest.winner is not None
                plans = [] if self._rivals is None else self._rivals(contest.winner.plan)
                if not contest.extend(plans):
                    break
                self._blocks, self._rivals, took = contest.blocks(), None, None
                continue
            if self._block and self._follow(self._block[0].plan):
                return
            took = None
        winner = contest.winner
        assert winner is not None
        if not self._follow(winner.plan):
            winner = contest.end(like=trainer.plan)
            self._follow(winner.plan)
        trainer.prepared.forget()  # what was prepared for the other plans
        if trainer.team.first:
            LOGGER.warning("%s", contest)
        if self.replanner is not None:
            self.replanner.forget_programs()
        if self._recorded is not None:
            self.replan_automatically(winner.fastest)
        self._fitted = self._rivals = None  # what was measured
        self._keep(winner)

    def _fitting(self, block: Sequence[Candidate]) -> list[Candidate]:
        """The candidates of a block that fit in memory; the others leave."""
        for candidate in block:
            if self._fitted is not None and candidate not in self._known:
                self._known.add(candidate)
                try:
                    plan = self._fitted(candidate.plan)
                except RequestError:  # a stage has no valid programs; the same on all ranks
                    plan = None
                candidate.plan, candidate.left = plan or candidate.plan, plan is None
        return [candidate for candidate in block if not candidate.left]

    def _follow(self, plan: Plan) -> bool:
        """Train by a plan from now on. Returns False if stages would have to move and cannot."""
        if arrangement(plan) != arrangement(self._trainer.plan):
            start = time.perf_counter()
            if not self._move(plan):
                return False
            self._moved_s = time.perf_counter() - start
        self._trainer.follow(plan)
        return True

    def _move(self, plan: Plan) -> bool:
        """Move stages to where a plan has them; returns False on all ranks if a rank cannot."""
        trainer, planner = self._trainer, self.replanner
        refusal = RequestError("") if planner is None else planner.refusal(trainer)
        if any(trainer.team.exchange().gather(refusal is not None)) or planner is None:
            return False
        with trainer.team.inside("a move of stages"):
            trainer.checks.check_last()
            trainer.stages.ensure_equal_values()
            others = [] if self.contest is None else [each.plan for each in self.contest.candidates]
            same = [other for other in others if arrangement(other) == arrangement(plan)]
            planner.move(trainer, self._checkpoints, plan, same)
        self._moved()
        return True

    def replan(self) -> bool:
        """Plan again for the present speeds of the devices; see `Pipeline.replan`."""
        moved = self._checked_replanner().replan(self._trainer, self._checkpoints)
        self._moved()
        return moved

    def _checked_replanner(self) -> Replanner:
        trainer = self._trainer
        trainer.team.tensors.refuse("replan of a pipeline")
        trainer.refuse_closed()
        trainer.averages.refuse_applied("plan again")
        trainer.stages.refuse_whole("plan again")
        trainer.checks.check_last()
        if self.replanner is None:
            raise RequestError("this pipeline cannot be planned again: build it with panpipe.pipeline on real devices")
        return self.replanner

    def replan_automatically(self, turns: Sequence[Turn]) -> None:
        """Find another plan whenever steps are slower for a while, and compare it with the present one.

        Args:
            turns: of the plan, also in an earlier run; later ones are compared with the fastest of nearly their size.
        """
        self._recorded = Candidate(self._trainer.plan, list(turns)).fastest

    def _look_at(self, turns: Sequence[Turn]) -> None:
        """Compare some steps with those before them, and look for another plan if all of them are slower."""
        known = {turn.of_class: turn for turn in self._recorded or ()}
        pairs = [(turn, known[turn.of_class]) for turn in turns if turn.size and turn.of_class in known]
        slower, now, before = min(
            ((now.each_s / before.each_s, now.seconds, before.each_s * now.size) for now, before in pairs),
            default=(0.0, 0.0, 0.0),
        )
        if len(pairs) < FEWEST or slower <= 1 + SLOWER:
            self._pause = 1
            self.replan_automatically([*known.values(), *turns])
            return
        first, contest = self._trainer.team.first, None
        if first:
            LOGGER.warning(
                "the fastest of the last %d steps took %.4g ms, and %.4g ms before", WINDOW, now * 1e3, before * 1e3
            )
        try:
            contest = self._checked_replanner().contest(self._trainer)
            if contest is not None:
                self.compare(contest, lambda won: None)
        except RequestError as error:
            if first:
                LOGGER.warning("%s", error)
        # The present times are those of the plan now; after attempts without a better plan it waits longer.
        self.replan_automatically([] if contest is not None else turns)
        self._pause = 1 if contest is not None else min(2 * self._pause, LONGEST)
