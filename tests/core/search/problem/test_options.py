"""The schedules to choose among, and the problem that their builders see."""

from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.costs import StageCosts, StageEdge
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import families, find_family
from panpipe.core.search.problem.options import Option, options, schedule_problem


def test_options_are_families_that_suit_the_problem_with_all_of_their_parameters():
    problem = ScheduleProblem(2, 4, 2)
    found = options(families().values(), problem)
    expected = [(f.name, p) for f in families().values() if f.supports(problem) for p in f.candidates(problem)]
    assert [(option.family.name, option.parameters) for option in found] == expected
    names = {option.family.name for option in found}
    assert "looped" in names
    assert "1f1b" not in names  # it has one stage a device
    assert {option.chunks for option in found} == {2}


def test_option_builds_none_for_an_unsupported_problem():
    assert Option(find_family("interleaved-1f1b"), {}, 2).placement(2) == (0, 1, 0, 1)
    option = Option(find_family("1f1b"), {}, 1)
    assert option.build(ScheduleProblem(2, 4, 1)) is not None
    assert option.build(ScheduleProblem(2, 4, 2)) is None


def test_schedule_problem_has_the_mean_hop_and_the_smallest_free_memory():
    costs = [StageCosts(1.0, 1.0, 1.0, parameter_bytes=10, workspace_bytes=w) for w in (1, 2, 3, 4)]
    edges = [StageEdge(0, 1, 20, 20), StageEdge(1, 2, 40, 40), StageEdge(0, 2, 999, 999)]
    problem = schedule_problem(
        fully_connected(2, 10**6, 10.0, 1.0), 8, placement=(0, 1, 0, 1), costs=costs, edges=edges, limits=(100.0, 90.0)
    )
    assert (problem.devices, problem.microbatches, problem.chunks) == (2, 8, 2)
    assert problem.hop_s == 4.0  # 3 s and 5 s; the third edge stays on its device
    assert problem.memory_limit == 90.0 - 20 - 4
