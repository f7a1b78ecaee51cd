"""Lower bounds of placements: literal values, and that no order is below."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.search.annealing.moves import MoveShares
from panpipe.core.search.annealing.packing import one_by_one
from panpipe.core.search.beam.placement_bound import placement_bounds
from panpipe.core.search.problem.meter import Meter
from panpipe.core.search.problem.setting import one_setting

from ....support.settings import setting_of


def bounds_of(setting, *placements):
    operators = len(setting.graph.nodes)
    like = one_by_one(setting, np.zeros(operators, dtype=np.int64), np.arange(1, operators)).best
    return placement_bounds(setting, like, np.array(placements, dtype=np.int64)).tolist()


def test_device_waits_for_its_first_forward_and_runs_all_its_work():
    # Device 1 starts at 1 s, and runs 4 · 3 s without a pause.
    assert bounds_of(setting_of([1.0, 1.0], backward=True), (0, 1)) == [13.0]


@pytest.mark.parametrize(("memory", "bound"), [(9.0, float("inf")), (10.0, 20.0), (20.0, 13.0)])
def test_memory_for_few_microbatches_makes_the_others_wait(memory, bound):
    # A microbatch of the first operator holds 10 bytes for 5 s: its F, F and I of the other, its I and its W.
    assert bounds_of(setting_of([1.0, 1.0], backward=True, saved=10, memory=memory), (0, 1)) == [bound]


@st.composite
def settings(draw):
    """Small graphs, chains with skips or with branches, with memory from one microbatch to ample."""
    count, number = draw(st.integers(2, 4)), st.integers(0, 9)
    nodes = tuple(
        OpNode(f"n{i}", draw(number), draw(number), draw(number), 0.5 * i, 2, draw(number), draw(number), draw(number))
        for i in range(count)
    )
    pairs = [(i, i + 1) for i in range(count - 1) if draw(st.integers(0, 4))]
    pairs += [pair for pair in itertools.combinations(range(count), 2) if not draw(st.integers(0, 3))]
    edges = tuple(OpEdge(f"n{a}", f"n{b}", draw(number)) for a, b in sorted(set(pairs)))
    held = sum(node.state_bytes + 2 * node.saved_bytes for node in nodes) + 9
    memory = float(draw(st.integers(held // 3, 3 * held)))
    return one_setting(OpGraph(nodes, edges), fully_connected(2, memory, 2.0, 0.5), 3, (memory, memory), None)


@given(settings(), st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_no_order_is_faster_than_the_bound_of_its_placement(setting, seed, draw):
    operators = len(setting.graph.nodes)
    device_of = np.array([draw.randrange(2) for _ in range(operators)], dtype=np.int64)
    walk = one_by_one(setting, device_of, np.arange(1, operators))
    walk.evaluate()
    (bound,) = bounds_of(setting, device_of)
    if walk.excess > 0:
        return
    walk.anneal(Meter(10**9), 300, seed, 0.01, MoveShares(0.0))
    assert walk.step_s >= bound * (1 - 1e-9)
