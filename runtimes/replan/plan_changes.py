"""The plans that may follow the present one of a pipeline: a contest's, and those found by planning again."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ...core.errors import RequestError
from ...core.plan.plan import Plan
from ..checkpoint.checkpoints import Checkpoints
from ..engine.step_data import StepOptions
from ..planning.contest import Candidate, Contest, Turn, arrangement
from ..planning.contest_run import ContestRun, Keep
from ..trainer import Trainer
from .replanner import AutomaticReplanning, Replanner


class PlanChanges:
    """Moves of a pipeline to other plans. All ranks call its methods together.

    Args:
        moved: called after stages have moved.

    Attributes:
        trains: trains on a batch by a plan that it chooses, and returns the loss; None if only the present plan runs.
        contest: the plans that the first steps compare; None if none are compared.
        replanner: plans again; None if that is not possible.
    """

    def __init__(self, trainer: Trainer, checkpoints: Checkpoints, moved: Callable[[], None]) -> None:
        self._trainer, self._checkpoints, self._moved = trainer, checkpoints, moved
        self.trains: Callable[[Any, StepOptions], Tensor] | None = None
        self.contest: Contest | None = None
        self.replanner: Replanner | None = None
        self._automatic: AutomaticReplanning | None = None

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

    def compare(
        self,
        contest: Contest,
        keep: Keep,
        fitted: Callable[[Plan], Plan | None] | None = None,
        rivals: Callable[[Plan], Sequence[Plan]] | None = None,
    ) -> None:
        """Train by the candidates of a contest in turns; see `ContestRun`."""

        def kept(winner: Candidate) -> None:
            if self.replanner is not None:
                self.replanner.forget_programs()
            self.trains = None
            if self._automatic is not None:
                self._automatic.record(winner.fastest)
                self.trains = self._automatic.train
            keep(winner)

        self.contest = contest
        self.trains = ContestRun(self._trainer, contest, self._move, kept, fitted, rivals).train

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

    def replan_automatically(self, recorded: Sequence[Turn]) -> None:
        """Find another plan whenever steps are slower for a while, and compare it with the present one.

        Args:
            recorded: the fastest steps of the plan in an earlier run.
        """

        def replan() -> bool:
            planner = self._checked_replanner()
            contest = planner.contest(self._trainer)
            if contest is not None:
                self.compare(contest, lambda won: None)
            return contest is not None

        self._automatic = AutomaticReplanning(self._trainer, replan, recorded)
        self.trains = self.trains or self._automatic.train
