"""Search over schedules and cuts together: a survey, short climbs from its best points, then one long climb."""

from collections.abc import Iterable, Mapping, Sequence
from random import Random

from attrs import Factory, define, evolve, frozen

from ..actions import Action
from ..cluster import Cluster
from ..costs import stage_costs, stage_edges
from ..graph import OpGraph
from ..partition import Cuts, PartitionProblem, RangeTables, nearest_cuts, stages_of
from ..schedules.problem import Schedule
from .assemble import assemble, with_replicas
from .options import Option, in_flight, schedule_problem
from .score import Candidate, Judge, Rank
from .shapes import Prefix, looped_cuts, moves, prefix_of, seeds

SHAPED = 2
"""Schedules of each number of chunks that are tried with other shapes."""
STARTS = 5
"""Numbers of chunks whose best point starts a short climb. Points with as many chunks meet again where their schedules
are exchanged."""
FINALISTS = 2
"""Points that go on to a longer climb."""
SEED = 0
ROUNDS = 20
WANDERINGS = 400
"""How often, at most, the search wanders from where no single move helps, and how many random moves it then tries."""
STEPS = (1, 1, 1, 2, 2, 3, 5, 8)
"""Operators that a random move steps over."""
LONGER = 0.003
"""Share by which a random move may lengthen the step, at first; less and less towards the end."""

Order = tuple[tuple[Action, ...], ...]


@frozen
class Point:
    """A place in the search: a schedule, the cuts it is applied to, and how good they are together."""

    option: Option
    schedule: Schedule
    cuts: Cuts
    rank: Rank


@define
class Search:
    """One search. It is over when the judge's budget is spent, or nothing around its best points is left to score."""

    graph: OpGraph
    cluster: Cluster
    microbatches: int
    judge: Judge
    parameter_sizes: Mapping[str, int] | None = None
    prefix: Prefix = Factory(lambda self: prefix_of(self.graph), takes_self=True)
    tables: RangeTables = Factory(lambda self: RangeTables(self.graph), takes_self=True)
    partitions: dict[tuple[tuple[int, ...], tuple[float, ...]], Cuts] = Factory(dict)
    schedules: dict[Order, Schedule] = Factory(dict)
    """One schedule for each compute order: two names for the same order are the same schedule."""
    scored: dict[tuple[int, Cuts], Rank] = Factory(dict)
    """By the identity of the schedule, which ``schedules`` keeps alive, and cuts."""

    @property
    def devices(self) -> int:
        return len(self.cluster.devices)

    def run(self, options: Sequence[Option]) -> Candidate | None:
        """Search among ``options``; the best candidate, or None where no option could be built."""
        points = self.survey(options)[:STARTS]
        points = _ranked(self.climb(point, self.judge.left // (3 * STARTS)) for point in points)[:FINALISTS]
        points = _ranked(self.climb(point, self.judge.left // (2 * FINALISTS)) for point in points)
        for point in points:
            self.finish(point, options)
        return self.judge.best

    def survey(self, options: Sequence[Option]) -> list[Point]:
        """Score each option with its own partition, and the best of each number of chunks with other shapes too.

        Returns:
            The best point of each number of chunks, best first.
        """
        firsts = (self.first(option) for option in options)
        points = _ranked({point.schedule.device_actions: point for point in firsts if point is not None}.values())
        leaders = []
        for chunks in dict.fromkeys(point.option.chunks for point in points):
            shaped = [point for point in points if point.option.chunks == chunks][:SHAPED]
            for point in list(shaped):
                for cuts in seeds(self.prefix, self.devices, chunks):
                    if self.judge.left > 0:
                        shaped.append(self.at(point, cuts))
            leaders.append(_ranked(shaped)[0])
        return _ranked(leaders)

    def first(self, option: Option) -> Point | None:
        """An option with the partition that suits what it holds in flight, or None where it cannot be built."""
        if self.judge.left <= 0:
            return None
        schedule = self.build(option, looped_cuts(self.prefix, self.devices, [1.0] * option.chunks))
        if schedule is None:
            return None
        flight = in_flight(schedule)
        key = schedule.placement, flight
        if key not in self.partitions:
            limits = tuple(self.judge.limits)
            problem = PartitionProblem(self.tables, self.cluster, schedule.placement, flight, limits)
            self.partitions[key] = nearest_cuts(problem)
        return self.at(Point(option, schedule, (), (0.0, 0.0)), self.partitions[key])

    def build(self, option: Option, cuts: Cuts) -> Schedule | None:
        """The option's schedule for stages of these cuts."""
        stages, placement = stages_of(self.graph, cuts), option.placement(self.devices)
        costs, edges = stage_costs(self.graph, stages), stage_edges(self.graph, stages)
        problem = schedule_problem(
            self.cluster, self.microbatches, placement=placement, costs=costs, edges=edges, limits=self.judge.limits
        )
        schedule = option.build(problem)
        return None if schedule is None else self.schedules.setdefault(schedule.device_actions, schedule)

    def at(self, point: Point, cuts: Cuts) -> Point:
        """The point with other cuts, scored unless it was before."""
        key = id(point.schedule), cuts
        if key not in self.scored:
            stages = stages_of(self.graph, cuts)
            plan = assemble(self.graph, stages, point.schedule, parameter_sizes=self.parameter_sizes)
            costs = with_replicas(self.graph, stage_costs(self.graph, stages), plan.tied)
            self.scored[key] = self.judge.score(plan, costs).rank
        return evolve(point, cuts=cuts, rank=self.scored[key])

    def climb(self, point: Point, allowance: int) -> Point:
        """Take every move that improves, with steps of about a stage first and of one operator last."""
        end = max(self.judge.left - allowance, 0)
        step = 1 << max((len(self.graph.nodes) // len(point.cuts)).bit_length() - 1, 0)
        while step >= 1:
            before = point.rank
            for move in moves(self.devices, point.option.chunks):
                if self.judge.left <= end:
                    return point
                cuts = move.of(self.prefix, point.cuts, self.devices, step)
                if cuts is not None:
                    point = min(point, self.at(point, cuts), key=_rank)
            if point.rank >= before:
                step //= 2
        return point

    def finish(self, point: Point, options: Sequence[Option]) -> Point:
        """Climb to where neither a move nor another schedule helps, then wander about and climb from there again."""
        random = Random(SEED)
        for _ in range(ROUNDS):
            before = self.judge.left
            point = self.settle(point, options)
            point = min(point, self.climb(self.wander(point, random), self.judge.left), key=_rank)
            if self.judge.left in (before, 0):
                break  # the budget is spent, or there is nothing around that was not scored yet
        return point

    def settle(self, point: Point, options: Sequence[Option]) -> Point:
        """Climb to where no move helps, see whether another schedule is better there, and go on from it."""
        while self.judge.left > 0:
            point = self.climb(point, self.judge.left)
            other = self.reschedule(point, options)
            if other.rank >= point.rank:
                break
            point = other
        return point

    def wander(self, point: Point, random: Random) -> Point:
        """Random moves, one to three at a time, taken unless they make the step much longer; the best point met."""
        best, choices = point, moves(self.devices, point.option.chunks)
        for left in range(WANDERINGS, 0, -1):
            cuts = point.cuts
            for _ in range(random.choice((1, 1, 2, 3)) if choices else 0):
                cuts = random.choice(choices).of(self.prefix, cuts, self.devices, random.choice(STEPS)) or cuts
            if self.judge.left <= 0:
                break
            other = self.at(point, cuts)
            room = 1 + LONGER * random.random() * left / WANDERINGS
            if other.rank[0] <= point.rank[0] and other.rank[1] <= point.rank[1] * room:
                point = other
            best = min(best, point, key=_rank)
        return best

    def reschedule(self, point: Point, options: Sequence[Option]) -> Point:
        """The best of all options with as many chunks at this point's cuts."""
        best = point
        for option in options:
            if option.chunks == point.option.chunks and self.judge.left > 0:
                schedule = self.build(option, point.cuts)
                if schedule is not None and schedule is not best.schedule:
                    other = self.at(Point(option, schedule, (), (0.0, 0.0)), point.cuts)
                    best = min(best, other, key=_rank)
        return best


def _rank(point: Point) -> Rank:
    return point.rank


def _ranked(points: Iterable[Point]) -> list[Point]:
    return sorted(points, key=_rank)
