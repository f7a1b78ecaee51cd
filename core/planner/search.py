"""Search over schedules and cuts together: a survey, short climbs from its best points, then one long climb."""

from collections.abc import Mapping, Sequence

from attrs import Factory, define, evolve, frozen

from ..actions import Action
from ..cluster import Cluster
from ..costs import stage_costs, stage_edges
from ..graph import OpGraph
from ..partition import Cuts, PartitionProblem, RangeTables, nearest_cuts, round_robin, stages_of
from ..schedules.problem import Schedule
from .assemble import assemble
from .options import Option, in_flight, schedule_problem
from .score import Candidate, Judge, Rank
from .shapes import Prefix, looped_cuts, moves, prefix_of, seeds

SURVEY_SHARE = 0.4
"""Of the budget, for the survey."""
STARTS = 6
"""Schedules from which a short climb starts, and below, how many go on to a longer one."""
FINALISTS = 2

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
    """One search. It is over when the judge's budget is spent, or no move improves its best point."""

    graph: OpGraph
    cluster: Cluster
    microbatches: int
    judge: Judge
    parameter_sizes: Mapping[str, int] | None = None
    prefix: Prefix = Factory(lambda self: prefix_of(self.graph), takes_self=True)
    tables: RangeTables = Factory(lambda self: RangeTables(self.graph), takes_self=True)
    partitions: dict[tuple[float, ...], Cuts] = Factory(dict)
    schedules: dict[Order, Schedule] = Factory(dict)
    """One schedule for each compute order: two names for the same order are the same schedule."""
    scored: dict[tuple[int, Cuts], Rank] = Factory(dict)
    """By the identity of the schedule, which ``schedules`` keeps alive, and cuts."""

    @property
    def devices(self) -> int:
        return len(self.cluster.devices)

    def run(self, options: Sequence[Option]) -> Candidate | None:
        """Search among ``options``; the best candidate, or None where no option could be built."""
        points = self.survey(options)
        points = [self.climb(p, self.judge.left // (3 * STARTS)) for p in points[:STARTS]]
        points = sorted(points, key=lambda p: p.rank)
        points = [self.climb(p, self.judge.left // (2 * FINALISTS)) for p in points[:FINALISTS]]
        for point in sorted(points, key=lambda p: p.rank):
            self.finish(point, options)
        return self.judge.best

    def survey(self, options: Sequence[Option]) -> list[Point]:
        """Score each option with its own partition, the best also with other shapes; a point a schedule, best first."""
        floor = self.judge.left * (1 - SURVEY_SHARE)
        points: dict[Order, Point] = {}
        for option in options:
            point = self.first(option)
            if point is not None:
                points.setdefault(point.schedule.device_actions, point)
            if self.judge.left <= floor:
                break
        best = sorted(points.values(), key=lambda p: p.rank)
        for index, point in enumerate(best):
            for cuts in seeds(self.prefix, self.devices, point.option.chunks):
                if self.judge.left <= floor:
                    break
                best[index] = min(best[index], self.at(point, cuts), key=lambda p: p.rank)
        return sorted(best, key=lambda p: p.rank)

    def first(self, option: Option) -> Point | None:
        """An option with the partition that suits what it holds in flight, or None where it cannot be built."""
        if self.judge.left <= 0:
            return None
        schedule = self.build(option, looped_cuts(self.prefix, self.devices, [1.0] * option.chunks))
        if schedule is None:
            return None
        flight = in_flight(schedule)
        if flight not in self.partitions:
            placement = round_robin(self.devices, option.chunks)
            problem = PartitionProblem(self.tables, self.cluster, placement, flight, tuple(self.judge.limits))
            self.partitions[flight] = nearest_cuts(problem)
        return self.at(Point(option, schedule, (), (0.0, 0.0)), self.partitions[flight])

    def build(self, option: Option, cuts: Cuts) -> Schedule | None:
        """The option's schedule for stages of these cuts."""
        stages = stages_of(self.graph, cuts)
        costs, edges = stage_costs(self.graph, stages), stage_edges(self.graph, stages)
        schedule = option.build(schedule_problem(self.cluster, self.microbatches, costs, edges, self.judge.limits))
        return None if schedule is None else self.schedules.setdefault(schedule.device_actions, schedule)

    def at(self, point: Point, cuts: Cuts) -> Point:
        """The point with other cuts, scored unless it was before."""
        key = id(point.schedule), cuts
        if key not in self.scored:
            stages = stages_of(self.graph, cuts)
            plan = assemble(self.graph, stages, point.schedule, parameter_sizes=self.parameter_sizes)
            self.scored[key] = self.judge.score(plan, stage_costs(self.graph, stages)).rank
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
                    point = min(point, self.at(point, cuts), key=lambda p: p.rank)
            if point.rank >= before:
                step //= 2
        return point

    def finish(self, point: Point, options: Sequence[Option]) -> Point:
        """Climb to where no move helps, see whether another schedule is better there, and go on from it."""
        while self.judge.left > 0:
            point = self.climb(point, self.judge.left)
            other = self.reschedule(point, options)
            if other.rank >= point.rank:
                break
            point = other
        return point

    def reschedule(self, point: Point, options: Sequence[Option]) -> Point:
        """The best of all options with as many chunks at this point's cuts."""
        best = point
        for option in options:
            if option.chunks == point.option.chunks and self.judge.left > 0:
                schedule = self.build(option, point.cuts)
                if schedule is not None and schedule is not best.schedule:
                    other = self.at(Point(option, schedule, (), (0.0, 0.0)), point.cuts)
                    best = min(best, other, key=lambda p: p.rank)
        return best
