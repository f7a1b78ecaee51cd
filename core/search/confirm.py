"""From a search to its result: an oracle has the last word, and is left the room that it counts beside the search.

The search counts a message as a pure delay that takes no memory. Where an oracle such as the simulator counts more, the
best few plans are scored by it; where the leading one does not fit by its word, the search leaves room and goes on.
"""

from collections.abc import Sequence

from attrs import evolve, frozen

from ..errors import RequestError
from ..plan.plan import Plan
from .annealing.search import search
from .annealing.walk import Walk, frontier
from .finish import Candidate, predicted, refuse_above, rescored, scored
from .problem.freedom import Freedom
from .problem.meter import Meter
from .problem.oracle import longest_path
from .problem.score import Oracle
from .problem.setting import Setting

MESSAGES = 4
"""Messages of a usual size that a device is counted to hold under way, where the oracle counts them and the search does
not: two received ahead, and one sent each way."""
RESCORED = 8
"""Plans that an oracle scores which is not the one that the search works with."""
SEARCHES = 3
"""Searches, at most, where an oracle counts memory that the search does not, such as that of messages: each further one
leaves room for what was missing."""
MORE_ROOM = 1.05
"""How many times what was missing."""
CONTINUED = 0.3
"""Share of the budget of a further search: it goes on from what was found."""


@frozen
class SearchResult:
    """What a search found.

    Args:
        plans: with their predictions: the fastest first, then, unless it alone was asked for, those that hold less on
            their fullest device than every faster one, each slower than the one before.
        evaluations: places that were evaluated.
        stopped: whether time or an interrupt cut the search short.
    """

    plans: tuple[Plan, ...]
    evaluations: int
    stopped: bool = False

    @property
    def best(self) -> Plan:
        """The fastest plan."""
        return self.plans[0]


def confirmed(
    settings: Sequence[Setting], freedom: Freedom, meter: Meter, oracle: Oracle, seed: int, alternatives: bool = True
) -> SearchResult:
    """The best plans of some settings, by the oracle's score; without ``alternatives`` the fastest alone.

    Raises:
        RequestError: no family is made for any setting.
        NothingFits: nothing found fits in memory; the message names the device that binds.
    """
    task = _Task(freedom, meter, oracle, seed, alternatives)
    if not task.exact:
        settings = [evolve(setting, messages=MESSAGES) for setting in settings]
    found = task.searched_with_room(settings)
    if not (found.fits or found.stopped or meter.until_fit or task.exact):
        # What the search counts decided where it went on; the part of it that ends with what fits may know better.
        scout = evolve(meter, spent=0, until_fit=True)
        more = evolve(task, meter=scout).searched_with_room(settings)
        meter.spent += scout.spent
        found = evolve(found, candidates=(*found.candidates, *more.candidates))
    return found.result(meter.spent)


@frozen
class _Task:
    """What stays the same over the searches for one result; arguments as of :func:`confirmed`."""

    freedom: Freedom
    meter: Meter
    oracle: Oracle
    seed: int
    alternatives: bool

    @property
    def exact(self) -> bool:
        """Whether the search counts as the oracle does."""
        return self.oracle is longest_path

    def searched_with_room(self, settings: Sequence[Setting]) -> "_Found":
        """Search; and again where the plan that leads by what the search counts does not fit by what the oracle
        counts."""
        found = self.searched(settings)
        rooms, meter = (0.0,) * len(settings[0].memory), self.meter
        budget = meter.budget if meter.until_fit else int(CONTINUED * meter.budget)
        for _ in range(0 if self.exact else SEARCHES - 1):
            if found.stopped or not found.misled:
                break
            missing = _missing(found.leader, len(rooms))
            rooms = tuple(had + MORE_ROOM * miss for had, miss in zip(rooms, missing, strict=True))
            if any(map(float.__ge__, rooms, map(float, settings[0].memory))):
                break
            meter.budget = meter.spent + budget
            roomy = [evolve(each, rooms=rooms) for each in settings]
            begun = () if meter.until_fit else _in_settings(found.walks, found.settings, roomy)
            more = self.searched(roomy, begun)
            found = evolve(more, candidates=(*found.candidates, *more.candidates))
        return found

    def searched(self, settings: Sequence[Setting], begun: Sequence[Walk] = ()) -> "_Found":
        """Search, and have the oracle score what is best."""
        walks, stopped = search(settings, self.freedom, self.meter, self.seed, begun)
        if not walks:
            raise RequestError(
                f"none of the schedules is made for {settings[0].devices} devices and {settings[0].microbatches} "
                "microbatches: give other families or another number of microbatches"
            )
        leading = walks[0]
        leading.tidy()
        first = rescored(walks, self.oracle, 1 if self.exact else RESCORED)
        best = min(first, key=lambda candidate: candidate.rank)
        found = [best]
        if self.alternatives or best.rank[0] > 0:
            known = {id(walk): candidate for walk, candidate in zip(walks, first, strict=False)}
            slower = [walk for walk in frontier(walks) if walk.step_s > leading.step_s]
            found += [known.get(id(walk)) or scored(walk, self.oracle) for walk in slower]
        misled = leading.excess == 0 and first[0].rank[0] > 0
        return _Found(tuple(found), first[0], misled, stopped, walks, settings)


def _in_settings(walks: Sequence[Walk], before: Sequence[Setting], now: Sequence[Setting]) -> list[Walk]:
    """Walks from the same places in other settings."""
    other = {id(old): new for old, new in zip(before, now, strict=True)}
    return [evolve(walk, setting=other[id(walk.setting)], best=walk.best.copy()) for walk in walks]


def _missing(candidate: Candidate, devices: int) -> list[float]:
    """Bytes that each of the cluster's devices lacks for a plan."""
    plan, missing = candidate.plan, [0.0] * devices
    for rank, device in enumerate(plan.mesh.cluster_devices):
        position = rank % plan.devices
        missing[device] = max(candidate.score.peak_memory_bytes[position] - candidate.limits[position], 0.0)
    return missing


@frozen
class _Found:
    """What a search found, by the oracle's word.

    Args:
        candidates: in no order.
        leader: the best by what the search itself counts.
        misled: whether that fits by what the search counts, and not by what the oracle does.
        stopped: see :class:`SearchResult`.
        walks, settings: of the search.
    """

    candidates: tuple[Candidate, ...]
    leader: Candidate
    misled: bool
    stopped: bool
    walks: Sequence[Walk]
    settings: Sequence[Setting]

    @property
    def fits(self) -> bool:
        """Whether one of them fits."""
        return any(candidate.rank[0] == 0 for candidate in self.candidates)

    def result(self, evaluations: int) -> SearchResult:
        """The fastest and the frontier. Raises NothingFits where none fits."""
        plans = _descending(self.candidates)
        refuse_above(plans[0], evaluations)
        return SearchResult(tuple(predicted(each, evaluations) for each in plans), evaluations, self.stopped)


def _descending(found: Sequence[Candidate]) -> list[Candidate]:
    """Those that hold less than every faster one, fastest first, by the oracle's own word."""
    kept: list[Candidate] = []
    for candidate in sorted(found, key=lambda candidate: candidate.rank):
        most = max(candidate.score.peak_memory_bytes)
        if not kept or (candidate.rank[0] == 0 and most < max(kept[-1].score.peak_memory_bytes)):
            kept.append(candidate)
    return kept
