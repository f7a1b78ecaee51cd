"""Even and balanced cuts."""

import numpy as np
from attrs import evolve
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.graph import OpGraph, OpNode
from panpipe.core.search.annealing.initial_walks import balanced_cuts, even_cuts
from panpipe.core.search.problem.setting import one_setting

from ....support.settings import setting_of


def test_even_cuts_divide_work_evenly_within_each_loop():
    assert even_cuts(setting_of([1.0] * 8), (0, 1)) == (0, 4, 8)
    assert even_cuts(setting_of([1.0] * 8), (0, 1, 0, 1)) == (0, 2, 4, 6, 8)
    assert even_cuts(setting_of([4.0, 1.0, 1.0, 2.0]), (0, 1)) == (0, 1, 4)


def test_even_cuts_give_a_faster_device_more_work():
    graph = OpGraph(tuple(OpNode(f"n{i}", 1.0) for i in range(9)), ())
    slow = evolve(graph, nodes=tuple(evolve(node, forward_s=2.0) for node in graph.nodes))
    setting = evolve(
        one_setting(graph, fully_connected(2, 10**6, 1.0, 0.0), 2, (1e6,) * 2, None), graphs=(graph, slow), kinds=(0, 1)
    )
    assert even_cuts(setting, (0, 1)) == (0, 6, 9)


def test_balanced_cuts_give_devices_equal_work_with_uneven_stages():
    times = [5.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    setting, placement = setting_of(times), np.array([0, 1, 1, 0])
    cuts = balanced_cuts(setting, placement, (0, 2, 4, 6, 8))
    loads = [0.0, 0.0]
    for stage, device in enumerate(placement):
        loads[device] += sum(times[cuts[stage] : cuts[stage + 1]])
    assert loads == [6.0, 6.0]
    assert list(cuts) == sorted(set(cuts))
