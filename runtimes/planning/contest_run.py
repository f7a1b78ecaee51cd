"""Runs a contest while a pipeline trains (`contest` has the rules).

step ──▶ turn of a candidate ──▶ … ──▶ end of a block: times of all ranks ──▶ next block, or the winner
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ...core.errors import RequestError
from ...core.logs import LOGGER
from ...core.plan.plan import Plan
from ..devices.compute import finished_s
from ..engine.step_data import StepOptions
from ..trainer import Trainer
from ..update.update import Ending
from .contest import Candidate, Contest, Turn, arrangement

Move = Callable[[Plan], bool]
"""Moves stages to where a plan has them, on all ranks together; returns False on all of them if stages must stay."""
Keep = Callable[[Candidate], None]
"""Is called with the winner on every rank."""


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
        loss, done = trainer.train(batch, options)
        ended = max(finished_s(queue.device) for queue in trainer.queues.values())
        self._seconds, self._size = self._seconds + ended - start, self._size + done.elements
        self._capture_s += varying.capture_s - captured_s
        if options.ending is Ending.STEP:
            self.turns.append(Turn(self._seconds, 0 if self._capture_s else self._size, self._capture_s))
            self._seconds = 0.0
        return loss

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


class ContestRun:
    """Trains by the candidates of a contest in turns.

    Args:
        trainer: of the pipeline; its plan is the first candidate's.
        fitted: called with a plan before its first turn; returns it with the memory of its programs, or None if it does
            not fit. All ranks call it together.
        rivals: called with the winner of the first plans; returns those that it is compared with next. All ranks call
            it together.
    """

    def __init__(
        self,
        trainer: Trainer,
        contest: Contest,
        move: Move,
        keep: Keep,
        fitted: Callable[[Plan], Plan | None] | None = None,
        rivals: Callable[[Plan], Sequence[Plan]] | None = None,
    ) -> None:
        self.contest = contest
        self._trainer, self._move, self._keep = trainer, move, keep
        self._fitted, self._rivals, self._known = fitted, rivals, {contest.candidates[0]}
        self._blocks = contest.blocks()
        self._block, self._timed = self._fitting(next(self._blocks)), TimedSteps(trainer)
        self._moved_s = 0.0

    def train(self, batch: Any, options: StepOptions) -> Tensor:
        """Train on a batch, by the plan whose turn it is. All ranks call this together.

        Returns:
            The loss, as ``Trainer.train``.
        """
        self._trainer.refuse_closed()
        if self._timed.begins():
            if len(self._timed.turns) == len(self._block):
                self._exchange()
            if self.contest.winner is None:
                self._run(self._block[len(self._timed.turns)].plan)
        return self._timed.train(batch, options)

    def _exchange(self) -> None:
        """End a block: all ranks learn the times of all, and begin the next block, or end the contest."""
        took: Sequence[Turn] | None = self._timed.agreed()
        if self.contest.move_s is not None:
            self.contest.move_s = max(self._trainer.team.exchange().gather(self._moved_s)) or self.contest.move_s
        while True:
            try:
                self._block = self._fitting(self._blocks.send(took))
            except StopIteration:
                assert self.contest.winner is not None
                plans = [] if self._rivals is None else self._rivals(self.contest.winner.plan)
                if not self.contest.extend(plans):
                    break
                self._blocks, self._rivals, took = self.contest.blocks(), None, None
                continue
            if self._block and self._run(self._block[0].plan):
                return
            took = None
        winner = self.contest.winner
        assert winner is not None
        if not self._run(winner.plan):
            winner = self.contest.end(like=self._trainer.plan)
            self._run(winner.plan)
        self._trainer.prepared.forget()  # what was prepared for the other plans
        if self._trainer.team.first:
            LOGGER.warning("%s", self.contest)
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

    def _run(self, plan: Plan) -> bool:
        """Train by a plan from now on. Returns False if stages would have to move and cannot."""
        trainer = self._trainer
        if arrangement(plan) != arrangement(trainer.plan):
            start = time.perf_counter()
            if not self._move(plan):
                return False
            self._moved_s = time.perf_counter() - start
        trainer.follow(plan)
        return True
