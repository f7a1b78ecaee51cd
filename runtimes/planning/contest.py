"""The contest of plans: the first steps of training run candidate plans in turns; the fastest step of each ranks it.

All plans compute the same, so training itself is the measurement. Noise only makes a step slower, so that the fastest
of several steps shows a plan's own speed: on recorded steps of a busy machine it finds the best plan where medians and
means do not.

1. Candidates with the same stages on the same devices form a group. They share programs, parameters and optimizers, and
   take turns step by step, in another order each time because batches may come in a rhythm. Between groups stages move,
   so a group stays for a block of turns, long enough that moves, and captures of sizes that are new to a group, take at
   most ``MOVES`` of the time, unless a number of turns is given.
2. A round has ``TURNS`` turns of each candidate. After a round a candidate leaves if its fastest step is slower than
   the fastest of all by more than ``SLOWER``, after the first round by more than ``MUCH_SLOWER``.
3. The contest ends with one candidate left, after ``ROUNDS`` rounds if the fastest is ahead by more than ``AHEAD``, and
   after one more round otherwise.
4. Of the candidates within ``ALIKE`` of the fastest, the preferred one wins: less memory, then the simpler schedule.
   But an uneven cut must gain ``UNEVEN`` over one whose stages have more equal numbers of operators.
5. The winner is then compared in the same way with other orders for its stages that are predicted to be about as fast.
   Predictions do not rank these, and stages seldom move for them.

Ranks know the order of a block in advance, and exchange their times at its end: the longest time over all ranks counts.

Batches of other sizes take other times. So a step is compared with steps of nearly the same size, by the number of
elements in its batch: sizes within a factor of ``NEARLY`` form a class, and times in a class are divided by the sizes.
What counts of a candidate is its fastest step in each class in which every candidate has steps, and their mean. A
contest has up to ``LONGER`` times as many rounds if there are too few such steps.
"""

import math
import statistics
from collections.abc import Callable, Generator, Sequence
from itertools import chain, groupby
from typing import Any

from attrs import define, field, frozen

from ...core.errors import RequestError
from ...core.plain_data import exchanged
from ...core.plan.plan import Plan

TURNS, ROUNDS = 4, 2
"""Turns of each candidate in a round, and rounds after which the contest may end. It ends one round later at most."""
MUCH_SLOWER, SLOWER, AHEAD, ALIKE, UNEVEN = 0.15, 0.05, 0.02, 0.01, 0.03
"""Shares of the fastest step: what makes a candidate leave after the first round and later, what ends the contest, what
counts as equal, and what an uneven cut must gain. Load may slow all of four steps by a tenth, but not all of eight."""
NEARLY, FEWEST, LONGER = 1.1, 2, 3
"""Largest ratio of the sizes of a class, about; fewest steps of each candidate in classes that all have; most rounds,
as a multiple of those that are wanted, if there are fewer."""
MOVES = 0.1
"""Largest share of the time of a contest in which stages move, and programs are captured or derived."""


@exchanged
@frozen
class Turn:
    """One turn of a candidate, on one rank or on all.

    Args:
        seconds: of its step; of its steps if gradients of several batches wait for one update.
        size: number of elements of its batches' tensors; 0 if its time says nothing, such as with a capture.
        capture_s: seconds of it in which the step was captured or programs were derived.
    """

    seconds: float
    size: int = 1
    capture_s: float = 0.0

    @property
    def of_class(self) -> int:
        """Number of the class of its size."""
        return round(math.log(self.size, NEARLY))

    @property
    def each_s(self) -> float:
        """Seconds of an element."""
        return self.seconds / self.size


@define(eq=False)
class Candidate:
    """A plan and its turns so far."""

    plan: Plan
    turns: list[Turn] = field(factory=list)
    left: bool = False

    @property
    def classes(self) -> dict[int, list[Turn]]:
        """Its comparable turns by class of size, the fastest first."""
        found: dict[int, list[Turn]] = {}
        for turn in sorted((turn for turn in self.turns if turn.size), key=lambda turn: turn.each_s):
            found.setdefault(turn.of_class, []).append(turn)
        return found

    @property
    def fastest(self) -> tuple[Turn, ...]:
        """Its fastest turn of each class."""
        return tuple(turns[0] for turns in self.classes.values())

    @property
    def unevenness(self) -> int:
        """Operators of its largest stage less those of its smallest."""
        sizes = [len(stage.nodes) for stage in self.plan.stages]
        return max(sizes) - min(sizes)

    def __str__(self) -> str:
        """Schedule, stages, and the fastest and the median step."""
        times = [turn.seconds for turn in self.turns if turn.size]
        shown = f"fastest step {min(times):.4g} s, median {statistics.median(times):.4g} s" if times else "no step"
        return f"{self.plan.schedule}, {len(self.plan.stages)} stages: {shown} of {len(self.turns)} turns"


class Contest:
    """The candidates of a contest, and their order.

    Args:
        order: the sorting key of plans, preferred ones first (`core/search/suggestions/preference`).
        move_s: seconds that a move of stages takes, as far as it is known; None if moves may take any time.
        rounds: rounds after which the contest may end.

    Attributes:
        candidates: in the order of ``plans``.
        winner: None while the contest runs.
    """

    def __init__(
        self, plans: Sequence[Plan], order: Callable[[Plan], Any], move_s: float | None = 0.0, rounds: int = ROUNDS
    ) -> None:
        self.candidates = [Candidate(plan) for plan in plans]
        self.move_s, self._order, self._rounds = move_s, order, rounds
        self._present = self.candidates[0]
        self.winner: Candidate | None = None

    @property
    def done(self) -> bool:
        """Whether there is a winner."""
        return self.winner is not None

    def blocks(self) -> Generator[Sequence[Candidate], Sequence[Turn] | None, None]:
        """Yields the candidates of the next turns, in order. Is sent the turns of those that have not left meanwhile.

        Is sent None if stages cannot move, and then these candidates leave.
        """
        for number in range(1, LONGER * (self._rounds + 1)):
            groups = _groups(self._left, self._present)
            for group in groups:
                spent_s, capture_s, turns = 0.0, 0.0, TURNS
                while turns:
                    here = [candidate for candidate in group if not candidate.left]
                    order = (here[turn % len(here) :] + here[: turn % len(here)] for turn in range(turns))
                    block = list(chain.from_iterable(order))
                    took = yield block
                    if took is None:
                        for candidate in group:
                            candidate.left = True
                        break
                    for candidate, turn in zip((each for each in block if not each.left), took, strict=True):
                        candidate.turns.append(turn)
                    spent_s += sum(turn.seconds - turn.capture_s for turn in took)
                    capture_s = max(capture_s, *(turn.capture_s for turn in took))
                    lost_s = 0.0 if self.move_s is None or len(groups) == 1 else self.move_s + capture_s
                    missing_s = lost_s * (1 / MOVES - 1) - spent_s
                    turns = math.ceil(missing_s / max(spent_s, 1e-9) * turns) if missing_s > 0 else 0
                else:
                    self._present = block[-1]
            if len(self._left) <= 1 or (self._enough and self._ended(number)):
                break
        self.end()

    def extend(self, plans: Sequence[Plan]) -> bool:
        """Let `blocks` compare the winner with those of some plans that are no candidates; False if all are."""
        known = {(each.plan.stages, each.plan.device_actions) for each in self.candidates}
        new = [Candidate(plan) for plan in plans if (plan.stages, plan.device_actions) not in known]
        if new:
            for each in self.candidates:
                each.left = each is not self.winner
            self.candidates, self.winner = [*self.candidates, *new], None
        return bool(new)

    @property
    def _left(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates if not candidate.left]

    @property
    def _enough(self) -> bool:
        """Whether the candidates that are left have enough steps to compare."""
        shared = shared_classes(self._left)
        return all(sum(len(each.classes[key]) for key in shared) >= FEWEST for each in self._left)

    def _ended(self, number: int) -> bool:
        """Whether the contest ends after a round; slow candidates leave."""
        times = fastest_steps(self._left)
        slower = MUCH_SLOWER if number == 1 < self._rounds else SLOWER
        for candidate, seconds in times.items():
            candidate.left = seconds > (1 + slower) * min(times.values())
        first, *others = sorted(times[candidate] for candidate in self._left)
        return not others or number > self._rounds or (number == self._rounds and others[0] > (1 + AHEAD) * first)

    def end(self, like: Plan | None = None) -> Candidate:
        """Choose the winner, and return it.

        Args:
            like: a plan whose arrangement the winner has; by default any.
        """
        left = [each for each in self._left or self.candidates if like is None or _alike(each.plan, like)]
        left = left or [each for each in self.candidates if like is not None and _alike(each.plan, like)]
        times = fastest_steps(left)
        if not times:
            self.winner = left[0]
            return left[0]
        fastest_s = min(times.values())

        def preferred(candidates: Sequence[Candidate], alike: float) -> list[Candidate]:
            near = [each for each in candidates if times[each] <= (1 + alike) * fastest_s]
            return sorted(near, key=lambda each: self._order(each.plan))

        winner = preferred(left, ALIKE)[0]
        same = [each for each in left if len(each.plan.stages) == len(winner.plan.stages)]
        evener = [each for each in same if each.unevenness < winner.unevenness]
        self.winner = winner = (preferred(evener, UNEVEN) or [winner])[0]
        return winner

    def __str__(self) -> str:
        """The result in one line."""
        won = self.winner
        if won is None:
            return f"{len(self._left)} of {len(self.candidates)} plans are still compared"
        text = f"plan: {won.plan.schedule}, {len(won.plan.stages)} stages"
        others = [(fastest_steps([won, each]), each) for each in self.candidates if each is not won]
        compared = [(times[each], times[won], each) for times, each in others if times]
        if not compared:
            return f"{text}; no steps of other plans had batches of nearly the same size"
        best_s, won_s, best = min(compared, key=lambda found: found[0] / found[1])
        count = len(shared_classes([won, best]))
        steps = "fastest step" if count == 1 else f"fastest steps of {count} sizes"
        counts = f"{len(won.turns)} and {len(best.turns)} turns"
        if len(won.turns) == len(best.turns):
            counts = f"{len(won.turns)} turns each"
        return (
            f"{text}; {steps} {won_s:.4g} s against {best_s:.4g} s of {best.plan.schedule}, "
            f"{len(best.plan.stages)} stages ({counts})"
        )

    def __repr__(self) -> str:
        return "\n".join([str(self), *(f"  {candidate}" for candidate in self.candidates)])


def shared_classes(candidates: Sequence[Candidate]) -> set[int]:
    """The classes of sizes in which every candidate has steps."""
    return set.intersection(*(set(candidate.classes) for candidate in candidates))


def fastest_steps(candidates: Sequence[Candidate]) -> dict[Candidate, float]:
    """The seconds by which candidates are compared (see above); empty if no class has steps of all of them.

    The unit is a step of the smallest size that any of them had in a class.
    """
    shared = shared_classes(candidates)
    least = {key: min(turn.size for each in candidates for turn in each.classes[key]) for key in shared}
    return {
        candidate: statistics.fmean(candidate.classes[key][0].each_s * least[key] for key in shared)
        for candidate in (candidates if shared else ())
    }


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
