"""The initial walks of a search: published schedules, and list-scheduled orders if memory is short."""

from collections.abc import Iterable, Iterator, Sequence

from ...actions import Action
from ...costs.partition import Cuts
from ...evaluate.coding import INFINITY
from ...plan.derive import Recompute, recomputed_stages
from ...schedules.construction.decode import DECODING
from ...schedules.problem import ScheduleProblem
from ..problem.options import Option, options, schedule_problem
from ..problem.search_space import SearchSpace
from ..problem.setting import Setting
from .even_cuts import even_cuts
from .fitting_cuts import fitting_cuts, most_in_flight
from .list_scheduled import list_scheduled
from .walk import Walk, start_walk

BUILT = 250_000
"""Largest number of compute actions in the initial schedules, which are built in plain Python."""
LEAST_STARTS = 6
"""Number of schedules for each setting, whatever their size."""
USUAL = 4
"""Multiple of that number of actions up to which at least one schedule of every family is built."""
ENOUGH = 12
"""Schedules that fit. With fewer, because memory is short, list-scheduled orders are added."""
LISTED = 0.1
"""Share of the evaluations for list-scheduled orders."""

PLACES = 4
"""Approximate number of pairs of placement and cuts for each number of stages per device."""
LEAST_LISTED = 4
"""Smallest number of list-scheduled orders for each of these pairs."""


class InitialWalks:
    """The initial walks of a search in some settings.

    Args:
        settings: to choose among.
        space: what the search may change.
    """

    def __init__(self, settings: Sequence[Setting], space: SearchSpace) -> None:
        self._settings, self._space = settings, space
        self._with_few: list[Setting] = []
        """Settings in which few published schedules fit, or too large ones for all to be built."""

    def published(self) -> Iterator[Walk]:
        """Evaluated walks for every setting, family, set of parameters and number of stages per device; not for all of
        them if schedules are large."""
        for setting in self._settings:
            yield from self._published(setting)

    def _published(self, setting: Setting) -> Iterator[Walk]:
        space = self._space
        seen: set[tuple[tuple[Action, ...], ...]] = set()
        problems: dict[tuple[int, ...], tuple[Cuts, ScheduleProblem]] = {}  # options share placements
        built = fitting = 0
        large, most = False, BUILT / len(self._settings)
        for count, option in enumerate(_options(setting, space)):
            least = LEAST_STARTS if built > USUAL * most else len(space.families)
            large = count >= least and built > most
            if large:
                break
            placement = option.placement(setting.devices)
            if placement not in problems:
                even = even_cuts(setting, placement)
                problems[placement] = even, problem_of(setting, placement, even)
            cuts, problem = problems[placement]
            schedule = option.build(problem)
            if schedule is not None and schedule.device_actions not in seen:
                seen.add(schedule.device_actions)
                walk = start_walk(setting, schedule, cuts, split=space.anneal and not setting.mixes)
                walk.best.recompute[list(recomputed_stages(space.recompute or "none", len(placement)))] = True
                yield from _fitting(walk, space.recompute)
                built += walk.actions
                fitting += walk.excess == 0
        if seen and (large or fitting < min(ENOUGH, len(seen))):
            self._with_few.append(setting)

    def list_scheduled(self, budget: int) -> Iterator[Walk]:
        """Walks with list-scheduled orders, for settings with few published schedules; none if orders must be a
        family's. They cost a share of ``budget`` evaluations."""
        if self._space.anneal:
            for setting in self._with_few:
                yield from _list_scheduled(setting, self._space, int(LISTED * budget / len(self._settings)))


def _list_scheduled(setting: Setting, space: SearchSpace, budget: int) -> Iterator[Walk]:
    """Walks that start with list-scheduled orders."""
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
    """The walk, evaluated. If it exceeds a limit, it gets cuts that fit, and a second walk recomputes some stages."""
    walk.evaluate()
    found, short = [walk], recompute is None and walk.excess > 0
    if walk.excess > 0:
        if recompute is None:
            found.append(walk.recomputing())
        if walk.setting.fixed is None:
            _fit(walk)
    for each in found:
        each.recomputes = short
        each.value = INFINITY
        each.free_buffers()
    return found


def _fit(walk: Walk) -> None:
    """Replace the cuts by ones that fit, or that exceed the limits less."""
    setting, candidate = walk.setting, walk.best
    flight = most_in_flight(candidate.orders, candidate.lengths, len(candidate.placement), setting.microbatches)
    cuts, fit = fitting_cuts(setting, candidate.placement, flight, candidate.recompute)
    before, excess = candidate.cuts.copy(), walk.excess
    candidate.cuts[:] = cuts
    walk.evaluate()
    if not fit and walk.excess > excess:
        candidate.cuts[:] = before


def _options(setting: Setting, space: SearchSpace) -> Iterable[Option]:
    """The options, sorted: each family's first set of parameters with its usual number of stages per device; then the
    first sets for the other numbers, from few stages to many; then the second sets, and so on."""
    found: list[tuple[int, Option]] = []
    for chunks in _chunk_numbers(setting, space):
        counts: dict[str, int] = {}
        for option in options(space.families, ScheduleProblem(setting.devices, setting.microbatches, chunks)):
            counts[option.family.name] = counts.get(option.family.name, -1) + 1
            found.append((counts[option.family.name], option))

    def place(item: tuple[int, Option]) -> tuple[int, bool]:
        number, option = item
        return number, number > 0 or option.chunks != option.family.usual_chunks

    return [option for _, option in sorted(found, key=place)]


def problem_of(setting: Setting, placement: Sequence[int], cuts: Cuts) -> ScheduleProblem:
    """The input of a schedule's builder, with the costs of the stages of these cuts."""
    _, costs, edges = setting.staged(cuts, placement)
    return schedule_problem(
        setting.cluster, setting.microbatches, placement=placement, costs=costs, edges=edges, limits=setting.limits,
        positions=setting.replicas[0],
    )  # fmt: skip
