"""What a search begins with: every schedule on cuts of its own, and orders of its own where memory is short."""

from collections.abc import Iterable, Iterator, Sequence

from ...actions import Action
from ...costs.partition import Cuts
from ...evaluate.coding import INFINITY
from ...plan.derive import Recompute, recomputed_stages
from ...schedules.problem import ScheduleProblem
from ..problem.options import Option, options, schedule_problem
from ..problem.search_space import SearchSpace
from ..problem.setting import Setting
from .balance import even_cuts
from .fitting import fitting_cuts, in_flight
from .list_scheduled import list_scheduled
from .walk import Walk, start_walk

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


class InitialWalks:
    """The starts of a search in some settings.

    Args:
        settings: to choose among.
        space: what the search may change.
    """

    def __init__(self, settings: Sequence[Setting], space: SearchSpace) -> None:
        self._settings, self._space = settings, space
        self._lacking: list[Setting] = []

    def published(self) -> Iterator[Walk]:
        """A walk for every setting, family, set of parameters and number of stages a device; fewer where they are
        large. What each holds too much is known."""
        for setting in self._settings:
            yield from self._published(setting)

    def _published(self, setting: Setting) -> Iterator[Walk]:
        space = self._space
        seen: set[tuple[tuple[Action, ...], ...]] = set()
        built = fitting = 0
        large = False
        for count, option in enumerate(_options(setting, space)):
            large = count >= LEAST_STARTS and built > BUILT / len(self._settings)
            if large:
                break
            placement = option.placement(setting.devices)
            cuts = even_cuts(setting, placement)
            schedule = option.build(problem_of(setting, placement, cuts))
            if schedule is not None and schedule.device_actions not in seen:
                seen.add(schedule.device_actions)
                walk = start_walk(setting, schedule, cuts, split=space.anneal and not setting.mixes)
                walk.best.recompute[list(recomputed_stages(space.recompute or "none", len(placement)))] = True
                yield from _fitting(walk, space.recompute)
                built += walk.actions
                fitting += walk.excess == 0
        if seen and (large or fitting < min(ENOUGH, len(seen))):
            self._lacking.append(setting)

    def own(self, budget: int) -> Iterator[Walk]:
        """Where orders may be of any kind, and few of the published ones fit or they are too large for all to be built:
        walks with orders of the search's own, for a share of so many evaluations (see `listed`)."""
        if self._space.anneal:
            for setting in self._lacking:
                yield from _own_starts(setting, self._space, int(LISTED * budget / len(self._settings)))


def _own_starts(setting: Setting, space: SearchSpace, budget: int) -> Iterator[Walk]:
    """Walks that begin with orders of the search's own."""
    numbers = _chunk_numbers(setting, space)
    orders = max(int(budget / DECODING / (PLACES * len(numbers))), LEAST_LISTED)
    built = 0
    for chunks in numbers:
        for each in list_scheduled(setting, chunks, space.recompute, orders):
            walk = start_walk(setting, each.schedule, each.cuts, split=not setting.mixes)
            walk.annealed, walk.best.recompute[:] = True, each.recompute
            walk.recomputes = space.recompute is None and bool(each.recompute.any())
            built += walk.actions
            yield walk
        if built > BUILT:
            break


def _chunk_numbers(setting: Setting, space: SearchSpace) -> range:
    fewest, most = space.chunks
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


def _options(setting: Setting, space: SearchSpace) -> Iterable[Option]:
    """Each family's first parameters for each number of stages a device come first, few stages before many."""
    found: list[tuple[int, Option]] = []
    for chunks in _chunk_numbers(setting, space):
        counts: dict[str, int] = {}
        for option in options(space.families, ScheduleProblem(setting.devices, setting.microbatches, chunks)):
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
