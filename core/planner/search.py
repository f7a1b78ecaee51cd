"""The search: every schedule on cuts of its own, then cuts and orders together, by successive halving.

1. Starts: every family with every set of parameters that it offers and every number of stages a device, on even cuts.
   Their cuts climb downhill. (Pfeife's algorithm 1 takes a beam of cuts for each set of parameters; this is its floor.)
2. The better ones go on annealing, cuts and orders together, each on its own costs, edges and memory limits; fewer and
   fewer of them with more and more moves (successive halving, Karnin et al. 2013).

Nothing here reads a clock: a budget counts evaluations, and the same request gives the same plan.
"""

from collections.abc import Iterable, Iterator, Sequence

from attrs import frozen

from ..actions import Action
from ..derive import Recompute, recomputed_stages
from ..partition import Cuts
from ..schedules.decode import INFINITY
from ..schedules.problem import ScheduleFamily, ScheduleProblem
from .balance import even_cuts
from .fitting import fitting_cuts, in_flight
from .listed import listed
from .meter import Meter, Stopped
from .moves import Ways
from .options import MAX_CHUNKS, Option, options, schedule_problem
from .setting import Setting
from .walk import Walk, start_walk, varied


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
BUILT = 250_000
"""Compute actions of the schedules that a search begins with; building them is plain Python."""
LEAST_STARTS = 6
"""Schedules that each setting begins with, whatever their size."""
ENOUGH = 12
"""Schedules that fit: where there are fewer, for want of memory, the search makes some of its own."""
LISTED = 0.1
"""Share of the evaluations for orders of the search's own."""
DECODING = 40
"""Places that are evaluated in the time in which one such order is made."""
PLACES = 4
"""Placements and cuts of them for each number of stages a device, about."""
LEAST_LISTED = 4
"""Orders of its own for each of them at least."""


@frozen
class Freedom:
    """What a search may change.

    Args:
        families: the schedules to choose among.
        anneal: whether orders may depart from the families'.
        chunks: fewest and most stages a device.
        recompute: see ``search_plans``.
    """

    families: tuple[ScheduleFamily, ...]
    anneal: bool = True
    chunks: tuple[int, int] = (1, MAX_CHUNKS)
    recompute: Recompute | None = "none"


def search(settings: Sequence[Setting], freedom: Freedom, meter: Meter, seed: int = 0) -> tuple[list[Walk], bool]:
    """Search for the fastest step among settings.

    Args:
        settings: to choose among; their steps are compared as they are.
        freedom: see :class:`Freedom`.
        meter: what may be spent.
        seed: of all random numbers.

    Returns:
        The walks, of which the best is first; and whether time or an interrupt cut the search short. No walks where no
        family is made for any setting.
    """
    walks: list[Walk] = []
    try:
        for walk in starts(settings, freedom, meter.budget):
            walks.append(walk)
            meter.spend(0)  # they take time
        rounds = _rounds(settings, freedom)
        for number, each in enumerate(rounds):
            allowance = meter.budget * each.share / max(sum(other.share for other in rounds), 1e-9)
            _round(walks, each, number, int(allowance), meter, seed)
    except (Stopped, KeyboardInterrupt):
        if not walks:
            raise
        if all(walk.value == INFINITY for walk in walks):
            for walk in walks:
                walk.judge()
                walk.rest()
        return _ranked(walks), True
    return _ranked(walks), False


def _rounds(settings: Sequence[Setting], freedom: Freedom) -> tuple[Round, ...]:
    climbs = (START,) if all(setting.fixed is not None for setting in settings) else CLIMBS
    return climbs + (ANNEALINGS if freedom.anneal else ())


def _round(walks: list[Walk], plan: Round, number: int, allowance: int, meter: Meter, seed: int) -> None:
    """One round, of ``allowance`` evaluations in all; each start is looked at once at least."""
    taking_part = varied(walks, plan.keep, plan.each)
    moves = max(allowance // max(len(taking_part), 1), 1)
    for place, walk in enumerate(taking_part):
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


def _ranked(walks: list[Walk]) -> list[Walk]:
    return sorted(walks, key=lambda walk: walk.value)


def starts(settings: Sequence[Setting], freedom: Freedom, budget: int = 0) -> Iterator[Walk]:
    """A walk for every setting, family, set of parameters and number of stages a device; fewer where they are large.

    Where orders may be of any kind, and few of these fit or they are too large for all to be built, a share of
    ``budget`` evaluations pays for some of the search's own (see `listed`).
    """
    for setting in settings:
        seen: set[tuple[tuple[Action, ...], ...]] = set()
        built = fitting = 0
        large = False
        for count, option in enumerate(_options(setting, freedom)):
            large = count >= LEAST_STARTS and built > BUILT / len(settings)
            if large:
                break
            placement = option.placement(setting.devices)
            cuts = even_cuts(setting, placement)
            schedule = option.build(problem_of(setting, placement, cuts))
            if schedule is not None and schedule.device_actions not in seen:
                seen.add(schedule.device_actions)
                walk = start_walk(setting, schedule, cuts, split=freedom.anneal and not setting.mixes)
                walk.best.recompute[list(recomputed_stages(freedom.recompute or "none", len(placement)))] = True
                yield from _fitting(walk, freedom.recompute)
                built += walk.actions
                fitting += walk.excess == 0
        if freedom.anneal and seen and budget and (large or fitting < min(ENOUGH, len(seen))):
            yield from _own_starts(setting, freedom, int(LISTED * budget / len(settings)))


def _own_starts(setting: Setting, freedom: Freedom, budget: int) -> Iterator[Walk]:
    """Walks that begin with orders of the search's own."""
    numbers = _chunk_numbers(setting, freedom)
    orders = max(int(budget / DECODING / (PLACES * len(numbers))), LEAST_LISTED)
    built = 0
    for chunks in numbers:
        for each in listed(setting, chunks, freedom.recompute, orders):
            walk = start_walk(setting, each.schedule, each.cuts, split=not setting.mixes)
            walk.annealed, walk.best.recompute[:] = True, each.recompute
            walk.recomputes = freedom.recompute is None and bool(each.recompute.any())
            built += walk.actions
            yield walk
        if built > BUILT:
            break


def _chunk_numbers(setting: Setting, freedom: Freedom) -> range:
    fewest, most = freedom.chunks
    return range(fewest, min(most, len(setting.graph.nodes) // setting.devices) + 1)


def _fitting(walk: Walk, recompute: Recompute | None) -> list[Walk]:
    """The walk; where it holds too much, on cuts that fit, and on its own with stages that recompute."""
    walk.judge()
    found, short = [walk], recompute is None and walk.excess > 0
    if walk.excess > 0:
        if recompute is None:
            found.append(walk.recomputing())
        if walk.setting.fixed is None:
            _fit(walk)
    for each in found:
        each.recomputes = short
        each.value = INFINITY
        each.rest()
    return found


def _fit(walk: Walk) -> None:
    """Cut so that the devices hold what they may, or as little too much as this finds."""
    setting, place = walk.setting, walk.best
    flight = in_flight(place.orders, place.lengths, len(place.placement), setting.microbatches)
    cuts, fit = fitting_cuts(setting, place.placement, flight, place.recompute)
    before, excess = place.cuts.copy(), walk.excess
    place.cuts[:] = cuts
    walk.judge()
    if not fit and walk.excess > excess:
        place.cuts[:] = before


def _options(setting: Setting, freedom: Freedom) -> Iterable[Option]:
    """Each family's first parameters for each number of stages a device come first, few stages before many."""
    found: list[tuple[int, Option]] = []
    for chunks in _chunk_numbers(setting, freedom):
        counts: dict[str, int] = {}
        for option in options(freedom.families, ScheduleProblem(setting.devices, setting.microbatches, chunks)):
            counts[option.family.name] = counts.get(option.family.name, -1) + 1
            found.append((counts[option.family.name], option))
    return [option for _, option in sorted(found, key=lambda item: item[0])]


def problem_of(setting: Setting, placement: Sequence[int], cuts: Cuts) -> ScheduleProblem:
    """What a builder is told: the costs of these stages."""
    _, costs, edges = setting.staged(cuts, placement)
    return schedule_problem(
        setting.cluster, setting.microbatches, placement=placement, costs=costs, edges=edges, limits=setting.limits,
        positions=setting.replicas[0],
    )  # fmt: skip
