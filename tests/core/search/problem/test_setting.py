"""Settings: limits, kinds of devices, bounds and estimates, by hand."""

import numpy as np
import pytest
from attrs import evolve
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.costs import StageCosts, StageEdge
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.costs.message_overhead import MessageLine
from panpipe.core.evaluate.compiled import make_stage_arrays
from panpipe.core.search.problem.candidate import Candidate
from panpipe.core.search.problem.setting import FixedStages, one_setting

from ....support.settings import setting_of

COST = StageCosts(1.0, 1.0, 1.0)
FIXED = FixedStages((("n0", "n1"), ("n2", "n3")), (COST, evolve(COST, forward_s=2.0)), (StageEdge(0, 1, 8, 8),))


def chain(*sizes, memory=100.0, **options):
    """Operators of 1 s whose tensors have these sizes."""
    nodes = tuple(OpNode(f"n{i}", 1.0, 1.0, 1.0) for i in range(len(sizes) + 1))
    edges = tuple(OpEdge(f"n{i}", f"n{i + 1}", size) for i, size in enumerate(sizes))
    cluster = fully_connected(4, memory, 10.0, 0.5)
    return one_setting(OpGraph(nodes, edges), cluster, 4, (memory,) * 4, None, **options)


def slower(setting, factor):
    """The setting's graph on devices that take this many times as long."""
    nodes = tuple(evolve(node, forward_s=node.forward_s * factor) for node in setting.graph.nodes)
    return evolve(setting.graph, nodes=nodes)


def test_limits_are_the_least_of_every_replica_without_reserved_bytes():
    setting = evolve(chain(10, 20, 30, 40), replicas=((0, 1), (2, 3)), memory=(100.0, 90.0, 80.0, 70.0))
    assert setting.devices == 2
    assert setting.limits == (80.0, 70.0)
    assert evolve(setting, reserved=(30.0, 0.0, 0.0, 5.0)).limits == (70.0, 65.0)


def test_limits_leave_messages_of_the_median_size_and_never_nothing():
    # The bytes that cross a cut after each operator: 10, 20, 30, 40 and, after the last one, 0.
    setting = evolve(chain(10, 20, 30, 40), reserved_messages=2)
    assert setting.limits == (60.0,) * 4
    assert evolve(setting, reserved_messages=100).limits == (1.0,) * 4


def test_position_is_as_slow_as_the_slowest_device_of_any_replica():
    setting = setting_of([1.0] * 4, devices=4)
    both = evolve(setting, graphs=(setting.graph, slower(setting, 2.0)), kinds=(0, 0, 1, 0), replicas=((0, 1), (2, 3)))
    assert both.slowest == (1, 0)
    assert both.speeds == (0.5, 1.0)
    costs = both.costs_of([["n0", "n1"], ["n2", "n3"]], (0, 1))
    assert [cost.forward_s for cost in costs] == [4.0, 2.0]


def test_stages_of_cuts_have_the_costs_and_edges_of_the_graph_and_their_messages_time():
    stages, costs, edges = chain(10, 20, 30).staged((0, 1, 4), (0, 1))
    assert (stages, edges) == ((("n0",), ("n1", "n2", "n3")), (StageEdge(0, 1, 10, 10),))
    assert [cost.forward_s for cost in costs] == [1.0, 3.0]
    _, timed, _ = chain(10, 20, 30, message=MessageLine(0.5, 0.25)).staged((0, 1, 4), (0, 1))
    assert [cost.forward_s for cost in timed] == [4.0, 6.0]


def test_given_stages_are_kept_whatever_the_cuts():
    setting = evolve(chain(10, 20, 30), fixed=FIXED)
    assert setting.staged((0, 1, 4), (0, 1)) == (FIXED.stages, FIXED.costs, FIXED.edges)
    assert setting.edges(2) == 1
    assert setting.bound_s == 0.0


def test_stages_have_at_most_the_edges_of_the_graph_or_one_for_each_pair():
    setting = chain(10, 20, 30)
    assert (setting.edges(2), setting.edges(3), setting.edges(4)) == (1, 3, 3)


@pytest.mark.parametrize(("fixed", "forward"), [(None, [1.0, 3.0]), (FIXED, [1.0, 2.0])])
def test_costs_of_a_place_are_those_of_its_cuts_or_of_the_given_stages(fixed, forward):
    setting, none = evolve(chain(10, 20, 30), fixed=fixed), np.zeros(0, dtype=np.int64)
    out = make_stage_arrays(2, setting.edges(2))
    setting.fill(Candidate(np.array([0, 1]), np.array([0, 1, 4]), np.zeros(2, dtype=np.bool_), none, none), out)
    assert out.times[0].tolist() == forward


def test_backwards_are_mixed_where_a_whole_one_is_faster_than_its_halves():
    setting = chain(10, 20, 30)
    fast = evolve(FIXED, costs=(COST, evolve(COST, backward_s=1.5)))
    assert [evolve(setting, fixed=fixed).mixes for fixed in (None, FIXED, fast)] == [False, False, True]


def test_bound_is_all_work_over_all_devices_or_one_microbatch_there_and_back():
    many, few = setting_of([1.0] * 4, microbatches=8), setting_of([1.0] * 4, microbatches=1)
    assert many.bound_s == 8 * 4 / 2
    assert few.bound_s == 4.0
    mixed = evolve(many, graphs=(many.graph, slower(many, 3.0)), kinds=(0, 1))
    assert mixed.bound_s == pytest.approx(8 / (1 / 4 + 1 / 12))


def test_estimate_orders_settings_by_time_and_puts_those_without_memory_last():
    setting = chain(10, 10, 10)
    lacks, step_s = setting.estimate
    # 12 s of work over four devices, 4 microbatches and 1.5 of the pipeline's fill; six hops of 0.5 s and 10 bytes.
    assert (lacks, step_s) == (False, pytest.approx(3.0 * 5.5 + 6 * 1.5))
    heavy = OpGraph(tuple(evolve(node, state_bytes=101) for node in setting.graph.nodes), setting.graph.edges)
    assert evolve(setting, graphs=(heavy,)).estimate[0]
    saving = OpGraph(tuple(evolve(node, saved_bytes=50) for node in setting.graph.nodes), setting.graph.edges)
    assert evolve(setting, graphs=(saving,)).estimate == (False, pytest.approx(3.0 * 5.5 * 4 / 3 + 6 * 1.5))
