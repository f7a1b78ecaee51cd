"""The contest of plans: the first steps of training run candidate plans in turns; the fastest step of each ranks it.

All plans compute the same, so training itself is the measurement. Noise only makes a step slower, so that the fastest
of several steps shows a plan's own speed: on recorded steps of a busy machine it finds the best plan where medians and
means do not.

1. Candidates with the same stages on the same devices form a group. They share programs, parameters and optimizers, and
   take turns step by step. Between groups stages move, so a group stays for a block of turns, long enough that moves
   take at most ``MOVES`` of the time.
2. A round has ``TURNS`` turns of each candidate. After a round a candidate leaves if its fastest step is more than
   ``MUCH_SLOWER`` slower than the fastest of all.
3. The contest ends with one candidate left, after ``ROUNDS`` rounds if the fastest is ahead by more than ``AHEAD``, and
   after one more round otherwise.
4. Of the candidates within ``ALIKE`` of the fastest, the preferred one wins: less memory, then the simpler schedule.

Ranks know the order of a block in advance, and exchange their times at its end: the longest time over all ranks counts.
"""

import math
import statistics
from collections.abc import Callable, Generator, Sequence
from itertools import groupby
from typing import Any

from attrs import define, field, frozen

from ...core.errors import RequestError
from ...core.plan.plan import Plan

TURNS, ROUNDS = 4, 2
"""Turns of each candidate in a round, and rounds after which the contest may end. It ends one round later at most."""
MUCH_SLOWER, AHEAD, ALIKE = 0.05, 0.02, 0.01
"""Shares of the fastest step: what makes a candidate leave, what ends the contest, and what counts as equal."""
MOVES = 0.1
"""Largest share of the time of a contest in which stages move."""


@frozen
class Turn:
    """One turn of a candidate, on one rank or on all.

    Args:
        seconds: of its step; of its steps if gradients of several batches wait for one update.
        comparable: whether its microbatches had the shapes of the contest's first turn.
    """

    seconds: float
    comparable: bool = True


@define(eq=False)
class Candidate:
    """A plan and its turns so far.

    Args:
        plan: with its prediction.
        turns: its turns.
        left: whether it has left the contest.
    """

    plan: Plan
    turns: list[Turn] = field(factory=list)
    left: bool = False

    @property
    def times(self) -> list[float]:
        """Seconds of its comparable steps."""
        return [turn.seconds for turn in self.turns if turn.comparable]

    @property
    def fastest_s(self) -> float:
        """Seconds of its fastest step; infinite if it has none."""
        return min(self.times, default=math.inf)

    def __str__(self) -> str:
        """Schedule, stages, and the fastest and the median step."""
        times = self.times
        shown = f"fastest step {min(times):.4g} s, median {statistics.median(times):.4g} s" if times else "no step"
        return f"{self.plan.schedule}, {len(self.plan.stages)} stages: {shown} of {len(self.turns)} turns"


class Contest:
    """The candidates of a contest, and their order.

    Args:
        plans: the candidates; the first one runs first.
        order: the sorting key of plans, preferred ones first (`core/search/suggestions/preference`).
        move_s: seconds that a move of stages takes, as far as it is known.
        rounds: rounds after which the contest may end.

    Attributes:
        candidates: in the order of ``plans``.
        winner: None while the contest runs.
        done: whether the winner's actions are measured, too.
    """

    def __init__(
        self, plans: Sequence[Plan], order: Callable[[Plan], Any], move_s: float = 0.0, rounds: int = ROUNDS
    ) -> None:
        self.candidates = [Candidate(plan) for plan in plans]
        self.move_s, self._order, self._rounds = move_s, order, rounds
        self.winner: Candidate | None = None
        self.done, self._comparable = False, True

    def blocks(self) -> Generator[Sequence[Candidate], Sequence[Turn] | None, None]:
        """Yields the candidates of the next turns, in order. Is sent these turns of all ranks when they are over; or
        None if stages cannot move, and then these candidates leave."""
        present = self.candidates[0]
        for number in range(1, self._rounds + 2):
            groups = _groups(self._left, present)
            for group in groups:
                spent_s, turns = 0.0, TURNS
                while turns:
                    block = [candidate for _ in range(turns) for candidate in group]
                    took = yield block
                    if took is None:
                        for candidate in group:
                            candidate.left = True
                        break
                    for candidate, turn in zip(block, took, strict=True):
                        candidate.turns.append(turn)
                    spent_s += sum(turn.seconds for turn in took)
                    missing_s = self.move_s * (1 / MOVES - 1) - spent_s if len(groups) > 1 else 0.0
                    turns = math.ceil(missing_s / max(spent_s, 1e-9) * turns) if missing_s > 0 else 0
                else:
                    present = group[-1]
            self._drop_slow()
            if len(self._left) == 1 or (number >= self._rounds and self._decided(number)):
                break
        self.end()

    @property
    def _left(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates if not candidate.left]

    @property
    def _compared(self) -> bool:
        """Whether every candidate that is left has a step to compare."""
        return all(candidate.times for candidate in self._left)

    def _drop_slow(self) -> None:
        if self._compared:
            fastest_s = min(candidate.fastest_s for candidate in self._left)
            for candidate in self._left:
                candidate.left = candidate.fastest_s > (1 + MUCH_SLOWER) * fastest_s

    def _decided(self, number: int) -> bool:
        first, second = sorted(candidate.fastest_s for candidate in self._left)[:2]
        return number > self._rounds or (self._compared and second > (1 + AHEAD) * first)

    def end(self, like: Plan | None = None) -> None:
        """Choose the winner.

        Args:
            like: a plan whose arrangement the winner has; by default any.
        """
        left = [each for each in self._left or self.candidates if like is None or _alike(each.plan, like)]
        left = left or [each for each in self.candidates if like is not None and _alike(each.plan, like)]
        self._comparable = all(candidate.times for candidate in left)
        if self._comparable:
            fastest_s = min(candidate.fastest_s for candidate in left)
            left = [candidate for candidate in left if candidate.fastest_s <= (1 + ALIKE) * fastest_s]
            self.winner = min(left, key=lambda candidate: self._order(candidate.plan))
        else:
            self.winner = left[0]

    def __str__(self) -> str:
        """The result in one line."""
        won = self.winner
        if won is None:
            return f"{len(self._left)} of {len(self.candidates)} plans are still compared"
        text = f"plan: {won.plan.schedule}, {len(won.plan.stages)} stages"
        others = [each for each in self.candidates if each is not won and each.times]
        if not self._comparable:
            return f"{text}; batches had different shapes, so that steps could not be compared"
        if not others:
            return f"{text}; fastest step {won.fastest_s:.4g} s of {len(won.turns)}"
        best = min(others, key=lambda each: each.fastest_s)
        counts = f"{len(won.turns)} and {len(best.turns)} turns"
        if len(won.turns) == len(best.turns):
            counts = f"{len(won.turns)} turns each"
        return (
            f"{text}; fastest step {won.fastest_s:.4g} s against {best.fastest_s:.4g} s of {best.plan.schedule}, "
            f"{len(best.plan.stages)} stages ({counts})"
        )

    def __repr__(self) -> str:
        return "\n".join([str(self), *(f"  {candidate}" for candidate in self.candidates)])


def arrangement(plan: Plan) -> tuple[Any, ...]:
    """What plans have in common that share programs, parameters and optimizers."""
    return plan.stages, plan.edges, plan.tied, plan.memory, plan.sync, plan.shard


def _alike(one: Plan, other: Plan) -> bool:
    return arrangement(one) == arrangement(other)


def _groups(candidates: Sequence[Candidate], first: Candidate) -> list[list[Candidate]]:
    """Candidates by arrangement, the group of one of them first."""
    keys = [arrangement(first.plan)]
    for candidate in candidates:
        if (key := arrangement(candidate.plan)) not in keys:
            keys.append(key)
    ordered = sorted(candidates, key=lambda each: keys.index(arrangement(each.plan)))
    return [list(group) for _, group in groupby(ordered, key=lambda each: keys.index(arrangement(each.plan)))]


def contest_rounds(given: object) -> int:
    """The rounds of ``contest=``: True, False, or the number of turns of each plan, at least 1.

    Raises:
        RequestError: it is none of these.
    """
    if isinstance(given, bool):
        return ROUNDS if given else 0
    if isinstance(given, int) and given >= 1:
        return math.ceil(given / TURNS)
    raise RequestError(
        f"contest is {given!r}: give True, False, or the number of steps that each plan runs at least, such as 8"
    )
