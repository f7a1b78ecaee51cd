"""The search: every schedule on cuts of its own, then cuts and orders together, by successive halving.

1. Starts: every family with every set of parameters that it offers and every number of stages a device, on even cuts.
   Their cuts climb downhill. (Pfeife's algorithm 1 takes a beam of cuts for each set of parameters; this is its floor.)
2. The better ones go on annealing, cuts and orders together, each on its own costs, edges and memory limits; fewer and
   fewer of them with more and more moves (successive halving, Karnin et al. 2013).

Nothing here reads a clock: a budget counts evaluations, and the same request gives the same plan.
"""

from collections.abc import Sequence

from attrs import evolve, frozen

from ...evaluate.coding import INFINITY
from ..problem.meter import Meter, Stopped
from ..problem.search_space import SearchSpace
from ..problem.setting import Setting
from .anneal import EXCESS
from .initial_walks import InitialWalks
from .moves import Ways
from .walk import Walk, ranked, varied


@frozen
class Round:
    """One round of successive halving.

    Args:
        keep: walks that take part, the best of those before.
        each: most of them with the same placement.
        share: of the budget for all of them together, in proportion to the other rounds'.
        warmth: of the annealing; 0 is straight downhill.
        cut: share of the moves that move cuts.
    """

    keep: int
    each: int
    share: float
    warmth: float
    cut: float


CLIMBS = (Round(1000, 1000, 0.04, 0.0, 1.0), Round(40, 6, 0.04, 0.0, 1.0))
"""Rounds for cuts alone."""
START = Round(1000, 1000, 0.0, 0.0, 0.0)
"""Every start as it is."""
ANNEALINGS = (
    Round(16, 3, 0.17, 0.002, 0.08), Round(5, 2, 0.30, 0.002, 0.08), Round(1, 1, 0.45, 0.002, 0.08),
)  # fmt: skip
"""Rounds for cuts and orders."""

SPLITS = 0.15
"""Share of the moves that split backwards or make them whole, where that makes a difference."""
RECOMPUTES = 0.04
"""Share of the moves that have a stage recompute or not, where some do or memory is short."""
COOL = 10
"""With fewer moves than so many times the actions annealing begins colder: there is no time to wander."""
SYSTEMATIC = 10
"""Where there are at most so many times as many cuts as moves, all of them are tried instead."""
FEW = 40_000
"""Most evaluations of a search that ends with the first plan that fits."""
SCOUTING = 0.5
"""Share of a smaller budget for it."""


def search(
    settings: Sequence[Setting], space: SearchSpace, meter: Meter, seed: int = 0, begun: Sequence[Walk] = ()
) -> tuple[list[Walk], bool]:
    """Search for the fastest step among settings.

    Where no start fits, a small part of the search looks for one thing that does; the rest goes on from there, too. A
    meter that wants no more than that gets just this part: whatever is found so is found by a whole search.

    Args:
        settings: to choose among; their steps are compared as they are.
        space: see :class:`SearchSpace`.
        meter: what may be spent.
        seed: of all random numbers.
        begun: walks of an earlier search, in these settings now, to go on from; none to begin with schedules.

    Returns:
        The walks, of which the best is first; and whether time or an interrupt cut the search short. No walks where no
        family is made for any setting.
    """
    if begun:
        return _continued(list(begun), settings, space, meter, seed)
    walks: list[Walk] = []
    scouted: list[Walk] = []
    starts, budget = InitialWalks(settings, space), meter.left
    try:
        for walk in starts.published():
            walks.append(walk)
            meter.spend(0)  # they take time
        if walks and all(walk.excess > 0 for walk in walks):
            scouted += [walk.again() for walk in walks]
            _scout(scouted, starts, settings, space, meter, seed)
        if meter.until_fit:
            _judge_all(walks)
            return ranked(walks + scouted), False
        for walk in starts.own(budget):
            walks.append(walk)
            meter.spend(0)
        walks += _fitting(scouted)
        scouted.clear()
        _all_rounds(walks, _rounds(settings, space), meter, seed)
    except (Stopped, KeyboardInterrupt):
        if not walks:
            raise
        return _ended(walks + _fitting(scouted)), True
    return _ended(walks), False


def _continued(
    walks: list[Walk], settings: Sequence[Setting], space: SearchSpace, meter: Meter, seed: int
) -> tuple[list[Walk], bool]:
    """Anneal on from walks whose limits changed: from those that fit now, and from fast ones that hold a little too
    much."""
    _judge_all(walks)
    most, each = ANNEALINGS[0].keep, ANNEALINGS[0].each
    fast = varied(walks, most, each, key=lambda walk: walk.step_s * (1 + EXCESS * walk.excess))
    chosen = fast + [walk for walk in varied(walks, most, each) if walk not in fast]
    first, *others = ANNEALINGS if space.anneal else _rounds(settings, space)[-1:]
    rounds = (evolve(first, keep=2 * most, each=2 * each), *others)
    try:
        _all_rounds(chosen, rounds, meter, seed)
    except (Stopped, KeyboardInterrupt):
        return ranked(walks), True
    return ranked(walks), False


def _all_rounds(walks: list[Walk], rounds: Sequence[Round], meter: Meter, seed: int) -> None:
    left = meter.left
    for number, each in enumerate(rounds):
        allowance = left * each.share / max(sum(other.share for other in rounds), 1e-9)
        _round(varied(walks, each.keep, each.each), each, number, int(allowance), meter, seed)


def _ended(walks: list[Walk]) -> list[Walk]:
    """The walks, best first; looked at as they are where there was nothing to spend."""
    if all(walk.value == INFINITY for walk in walks):
        _judge_all(walks)
    return ranked(walks)


def _scout(
    walks: list[Walk], starts: InitialWalks, settings: Sequence[Setting], space: SearchSpace, meter: Meter, seed: int
) -> None:
    """A search of few evaluations that goes on from what holds least too much, and from what is fast for what it holds
    too much, until something fits."""
    left = min(FEW, int(SCOUTING * meter.left))
    walks += starts.own(left)
    _judge_all(walks)
    rounds = _rounds(settings, space)
    for number, each in enumerate(rounds):
        if _fitting(walks):
            return
        before = meter.spent
        allowance = left * each.share / max(sum(other.share for other in rounds[number:]), 1e-9)
        taking_part = varied(walks, each.keep - each.keep // 2, each.each, key=lambda walk: (walk.excess, walk.value))
        others = [walk for walk in walks if walk not in taking_part]
        taking_part += varied(others, each.keep - len(taking_part), each.each)
        _round(taking_part, each, number, int(allowance), meter, seed, until_fit=True)
        left -= meter.spent - before


def _fitting(walks: Sequence[Walk]) -> list[Walk]:
    return [walk for walk in walks if walk.excess == 0]


def _judge_all(walks: Sequence[Walk]) -> None:
    for walk in walks:
        walk.judge()
        walk.rest()


def _rounds(settings: Sequence[Setting], space: SearchSpace) -> tuple[Round, ...]:
    climbs = (START,) if all(setting.fixed is not None for setting in settings) else CLIMBS
    return climbs + (ANNEALINGS if space.anneal else ())


def _round(
    taking_part: Sequence[Walk],
    plan: Round,
    number: int,
    allowance: int,
    meter: Meter,
    seed: int,
    *,
    until_fit: bool = False,
) -> None:
    """One round, of ``allowance`` evaluations in all; each start is looked at once at least. ``until_fit`` ends it with
    the first that fits."""
    moves = max(allowance // max(len(taking_part), 1), 1)
    for place, walk in enumerate(taking_part):
        if until_fit and place and taking_part[place - 1].excess == 0:
            return
        ways = Ways(
            plan.cut if walk.setting.fixed is None else 0.0,
            RECOMPUTES if walk.recomputes and walk.setting.fixed is None else 0.0,
            SPLITS if walk.setting.mixes and plan.warmth else 0.0,
        )
        if plan.cut == 1 and walk.setting.fixed is None and walk.cut_count <= min(SYSTEMATIC * moves, meter.left):
            walk.try_every_cut(meter)
            walk.rest()
            continue
        warmth = plan.warmth * min(moves / (COOL * max(walk.actions, 1)), 1.0)
        walk.go(meter, min(moves, meter.left), (seed * 101 + number) * 100_003 + place, warmth, ways)
        walk.rest()
