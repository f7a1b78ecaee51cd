"""The search: published schedules with cuts of their own, then annealing of cuts and orders, by successive halving.

1. Starts: every family with each of its sets of parameters and each number of stages per device, on even cuts. Their
   cuts are improved by descent. (Pfeife's algorithm 1 keeps a beam of cuts for each set of parameters; this does no
   worse.)
2. Cuts and orders of the better ones are annealed together, with their own costs, edges and memory limits; fewer walks
   get more moves in each round (successive halving, Karnin et al. 2013).
3. In a small graph, the best ones continue with one stage for each operator, which moves to any device; at the end
   the best order alone.

Nothing here reads a clock: a budget counts evaluations, and the same request gives the same plan.
"""

from collections.abc import Sequence

from attrs import evolve, frozen

from ...errors import RequestError
from ...schedules.problem import ScheduleProblem
from ...timing.coding import INFINITY
from ..problem.meter import Meter, Stopped
from ..problem.setting import Setting
from ..search_options import MAX_CHUNKS, SearchOptions
from .anneal import EXCESS
from .free_placement import joined, packed, refined
from .initial_walks import InitialWalks
from .moves import MoveShares
from .walk import Walk, best_by_placement, ranked


@frozen
class Round:
    """One round of successive halving.

    Args:
        keep: number of walks in this round, the best of the round before.
        each: largest number of them with the same placement.
        share: of the budget for all of them together, relative to the other rounds' shares.
        temperature: of the annealing; 0 is pure descent.
        cut: share of the moves that move cuts.
        place: share of the moves that move stages to other devices.
    """

    keep: int
    each: int
    share: float
    temperature: float
    cut: float
    place: float = 0.0


DESCENTS = (Round(1000, 1000, 0.04, 0.0, 1.0), Round(40, 6, 0.04, 0.0, 1.0))
"""Rounds for cuts alone."""
START = Round(1000, 1000, 0.0, 0.0, 0.0)
"""Evaluates every start unchanged."""
ANNEALINGS = (
    Round(16, 3, 0.17, 0.002, 0.08), Round(5, 2, 0.30, 0.002, 0.08), Round(1, 1, 0.45, 0.002, 0.08),
)  # fmt: skip
"""Rounds for cuts and orders."""
PLACEMENTS = (
    Round(24, 3, 0.5, 0.03, 0.0, 0.25), Round(4, 1, 0.3, 0.01, 0.0, 0.15), Round(1, 1, 0.2, 0.003, 0.0, 0.05),
)  # fmt: skip
"""Rounds for devices and orders of single operators."""
SCREENED = Round(60, 60, 0.4, 0.03, 0.0)
"""A round before these, of more placements with one microbatch after another."""
PLACING, SMALL = 0.85, 500
"""Share of the budget for these rounds, and evaluations in it for each action of single operators from which on there
are any: larger graphs gain nothing."""
TURNS, AGAIN = 3, 4_000
"""How often the rounds are run from this many evaluations for each of these actions on: the best order of a tiny graph
often depends on the random numbers."""
REORDERED, FURTHER = Round(4, 4, 1.0, 0.03, 0.0), 0.25
"""A last round there for the order of the best placement alone, with several random numbers; and its evaluations, as a
share of the budget and in addition to it. A given budget has no such round."""
PACKED = 2
"""Walks with one microbatch after another, where no other start fits."""
JOINED = 4
"""Walks whose stages are joined again at the end."""

SPLITS = 0.15
"""Share of the moves that split a B or join an I with its W, if B and I with W take different times, or messages share
links: the gradient is sent after B."""
RECOMPUTES = 0.04
"""Share of the moves that switch a stage's recomputation, if it is the search's choice and memory is short."""
COOL = 10
"""Moves per action below which annealing starts at a lower temperature."""
SYSTEMATIC = 10
"""Number of possible cuts per move up to which all cuts are tried instead of random moves."""
FEW = 40_000
"""Most evaluations of a search that ends with the first plan that fits."""
SCOUTING = 0.5
"""Share of the budget for such a search within a whole search, if that is less."""


def search(
    settings: Sequence[Setting],
    space: SearchOptions,
    meter: Meter,
    seed: int = 0,
    earlier: Sequence[Walk] = (),
    others: Sequence[Walk] = (),
) -> tuple[list[Walk], bool]:
    """Search for the fastest step among settings.

    If no start fits, the first part of the search looks for one walk that fits; the rest of the search continues with
    it and with the starts. With ``meter.until_fit`` the search ends after that first part.

    Args:
        settings: to choose among, by their step times.
        earlier: walks of an earlier search to continue from, in these settings; none to start with schedules.
        others: further starts.

    Returns:
        The walks, best first, and whether a time limit or an interrupt ended the search early.

    Raises:
        RequestError: no family supports any setting.
    """
    if earlier:
        return _continued(list(earlier), settings, space, meter, seed)
    walks: list[Walk] = []
    scouted: list[Walk] = []
    starts, budget = InitialWalks(settings, space), meter.left
    try:
        for walk in starts.published():
            if meter.until_fit and walks and walks[-1].setting is not walk.setting and _fitting(walks):
                break
            walks.append(walk)
            meter.spend(0)  # no evaluation, but building it takes time
        if not walks:
            raise _unsupported(settings[0], space)
        if all(walk.excess > 0 for walk in walks):
            scouted += [walk.copy() for walk in walks]
            scouted += _packed(settings, space)
            _scout(scouted, starts, settings, space, meter, seed)
        if meter.until_fit:
            evaluate_all(walks)
            return ranked(walks + scouted), False
        for walk in starts.list_scheduled(budget):
            walks.append(walk)
            meter.spend(0)
        walks += [*_fitting(scouted), *others]
        scouted.clear()
        placing = placing_moves(settings, space, meter.left)
        all_rounds(walks, _rounds(settings, space), meter, seed, 1 - PLACING if placing else 1.0)
        if placing:
            turns = TURNS if placing >= AGAIN else 1
            for turn in range(turns):
                _place(walks, settings[0], meter, seed + turn, screened=turn > 0, share=1 / (turns - turn))
            if turns > 1 and meter.most is None:
                _reorder(walks, meter, seed)
    except (Stopped, KeyboardInterrupt):
        if not walks:
            raise
        return _ended(walks + _fitting(scouted), meter), True
    return _ended(walks, meter), False


def _unsupported(setting: Setting, space: SearchOptions) -> RequestError:
    """Why no family has a schedule: there are too few operators for its stages, or it is not for these numbers."""
    names = " and ".join(f"'{family.name}'" for family in space.families)
    devices, operators = setting.devices, len(setting.graph.nodes)
    for chunks in range(space.chunks[0], MAX_CHUNKS + 1):
        problem = ScheduleProblem(devices, setting.microbatches, chunks)
        if chunks * devices > operators and any(list(family.candidates_of(problem)) for family in space.families):
            return RequestError(
                f"{names} needs {chunks} stages on each of {devices} devices, and the model has {operators} operators: "
                f"a stage needs at least one; name another schedule, such as '1f1b', or use at most "
                f"{operators // chunks} devices"
            )
    stages = " to ".join(map(str, sorted(set(space.chunks))))
    return RequestError(
        f"no schedule of {names} for {devices} devices with {stages} stages each and {setting.microbatches} "
        "microbatches: name another schedule, or other numbers"
    )


def _continued(
    walks: list[Walk], settings: Sequence[Setting], space: SearchOptions, meter: Meter, seed: int
) -> tuple[list[Walk], bool]:
    """Continue annealing walks whose limits changed: the best that fit, and fast ones that exceed a limit a little."""
    evaluate_all(walks)
    most, each = ANNEALINGS[0].keep, ANNEALINGS[0].each
    fast = best_by_placement(walks, most, each, key=lambda walk: walk.step_s * (1 + EXCESS * walk.excess))
    chosen = fast + [walk for walk in best_by_placement(walks, most, each) if walk not in fast]
    first, *others = ANNEALINGS if space.anneal else _rounds(settings, space)[-1:]
    rounds = (evolve(first, keep=2 * most, each=2 * each), *others)
    try:
        all_rounds(chosen, rounds, meter, seed)
    except (Stopped, KeyboardInterrupt):
        return ranked(walks), True
    return ranked(walks), False


def placing_moves(settings: Sequence[Setting], space: SearchOptions, left: int) -> float:
    """Evaluations that are left for each action of single operators if these are placed freely: the graph is small, and
    neither stages nor their number are given. 0 if they are not."""
    first = settings[0]
    if not space.anneal or space.chunks[0] > 1 or space.chunks[1] < MAX_CHUNKS or first.fixed or first.devices == 1:
        return 0.0
    each = left / (3 * len(first.graph.nodes) * max(setting.microbatches for setting in settings))
    return each if each >= SMALL else 0.0


def _place(walks: list[Walk], setting: Setting, meter: Meter, seed: int, *, screened: bool, share: float) -> None:
    """Add walks whose single operators are placed freely, from the best walks and from one microbatch after another.

    Args:
        walks: of the search; changed.
        screened: whether ``SCREENED`` chooses among more placements.
        share: of the evaluations that are left.
    """
    end, half = meter.spent + int(share * meter.left), PLACEMENTS[0].keep // 2
    starts = list(packed(setting, SCREENED.keep if screened else half))
    if screened and starts:
        _round(starts, SCREENED, 0, int(SCREENED.share * meter.left), meter, seed)
    free = best_by_placement(walks, half, 1) + best_by_placement(starts, half, half)
    free = [refined(walk) for walk in free]
    all_rounds(free, PLACEMENTS, meter, seed, max(end - meter.spent, 0) / max(meter.left, 1))
    walks += [joined(walk) for walk in best_by_placement(free, JOINED, 1)]


def _reorder(walks: list[Walk], meter: Meter, seed: int) -> None:
    """Add the best walk with its order annealed further: of a tiny graph a placement's best order is rarely found among
    moves of placements."""
    part = meter.part(int(FURTHER * meter.budget))
    again = [refined(ranked(walks)[0]) for _ in range(REORDERED.keep)]
    _round(again, REORDERED, 0, part.left, part, seed)
    meter.spent += part.spent
    walks.append(joined(ranked(again)[0]))


def all_rounds(walks: list[Walk], rounds: Sequence[Round], meter: Meter, seed: int, share: float = 1.0) -> None:
    """Successive halving: the rounds one after another, with a share of the evaluations that are left."""
    left = share * meter.left
    for number, each in enumerate(rounds):
        allowance = left * each.share / max(sum(other.share for other in rounds), 1e-9)
        _round(best_by_placement(walks, each.keep, each.each), each, number, int(allowance), meter, seed)


def _ended(walks: list[Walk], meter: Meter) -> list[Walk]:
    """The walks, best first. Those that no round has reached are evaluated first, or they would rank last; they are
    counted if the search ended before any round."""
    missing = [walk for walk in walks if walk.value == INFINITY]
    evaluate_all(missing)
    meter.spent += len(walks) if len(missing) == len(walks) else 0
    found = ranked(walks)
    meter.report(found[0].step_s if found[0].excess == 0 else INFINITY)  # a start may lead
    return found


def _scout(
    walks: list[Walk], starts: InitialWalks, settings: Sequence[Setting], space: SearchOptions, meter: Meter, seed: int
) -> None:
    """A short search that ends when a walk fits: half of each round are the walks with the least excess memory, half
    those with the best objective."""
    left = min(FEW, int(SCOUTING * meter.left))
    walks += starts.list_scheduled(left)
    evaluate_all(walks)
    rounds = _rounds(settings, space)
    for number, each in enumerate(rounds):
        if _fitting(walks):
            return
        before = meter.spent
        allowance = left * each.share / max(sum(other.share for other in rounds[number:]), 1e-9)
        taking_part = best_by_placement(
            walks, each.keep - each.keep // 2, each.each, key=lambda walk: (walk.excess, walk.value)
        )
        others = [walk for walk in walks if walk not in taking_part]
        taking_part += best_by_placement(others, each.keep - len(taking_part), each.each)
        _round(taking_part, each, number, int(allowance), meter, seed, until_fit=True)
        left -= meter.spent - before


def _packed(settings: Sequence[Setting], space: SearchOptions) -> list[Walk]:
    """Walks with one microbatch after another on devices that fit, of the first setting in which some exist."""
    if space.anneal and space.chunks[0] == 1 and space.chunks[1] >= MAX_CHUNKS:
        for setting in settings:
            if setting.fixed is None and (found := list(packed(setting, PACKED))):
                return found
    return []


def _fitting(walks: Sequence[Walk]) -> list[Walk]:
    return [walk for walk in walks if walk.excess == 0]


def evaluate_all(walks: Sequence[Walk]) -> None:
    """Evaluate the best candidates of some walks."""
    for walk in walks:
        walk.evaluate()
        walk.free_buffers()


def _rounds(settings: Sequence[Setting], space: SearchOptions) -> tuple[Round, ...]:
    first = (START,) if all(setting.fixed is not None for setting in settings) else DESCENTS
    return first + (ANNEALINGS if space.anneal else ())


def _round(
    taking_part: Sequence[Walk],
    given: Round,
    number: int,
    allowance: int,
    meter: Meter,
    seed: int,
    *,
    until_fit: bool = False,
) -> None:
    """Run one round of ``allowance`` evaluations; each walk is evaluated at least once. ``until_fit`` ends it with the
    first walk that fits."""
    moves = max(allowance // max(len(taking_part), 1), 1)
    for place, walk in enumerate(taking_part):
        if until_fit and place and taking_part[place - 1].excess == 0:
            return
        shares = MoveShares(
            given.cut if walk.setting.fixed is None else 0.0,
            RECOMPUTES if walk.recomputes and walk.setting.fixed is None else 0.0,
            SPLITS if (walk.setting.mixes or walk.setting.contended) and given.temperature else 0.0,
            given.place,
        )
        if given.cut == 1 and walk.setting.fixed is None and walk.cut_count <= min(SYSTEMATIC * moves, meter.left):
            walk.try_every_cut(meter)
            walk.free_buffers()
            continue
        temperature = given.temperature * min(moves / (COOL * max(walk.actions, 1)), 1.0)
        walk.anneal(meter, min(moves, meter.left), (seed * 101 + number) * 100_003 + place, temperature, shares)
        walk.free_buffers()
