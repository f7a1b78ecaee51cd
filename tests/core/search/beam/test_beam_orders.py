"""Orders from beam searches: sound, within memory, and the fastest where nothing is dropped."""

import itertools
import random
import subprocess
import sys

import numpy as np
import pytest
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.evaluate.compiled import make_stage_arrays
from panpipe.core.plan.validation.validate import validate
from panpipe.core.search.annealing.packing import one_by_one
from panpipe.core.search.beam.beam_orders import BeamSearch
from panpipe.core.search.finalize import draft
from panpipe.core.search.problem.setting import one_setting

from ....support.orders.by_trial import fastest_by_trial
from ....support.settings import setting_of

ALL = 10**9


def searched(setting, device_of, width=1000, stop_s=float("inf"), most=ALL):
    """The walk with the order that is found, and the result."""
    walk = one_by_one(setting, np.array(device_of), np.arange(1, len(device_of)))
    stages, best = len(device_of), walk.best
    costs = make_stage_arrays(stages, setting.edges(stages))
    setting.fill(best, costs)
    search = BeamSearch(setting.microbatches, best.placement, costs, np.array(setting.limits))
    found = search.fill_fastest(width, most, stop_s, best.orders, best.lengths)
    walk.evaluate()
    return walk, found


# A microbatch holds 20 bytes of the first device and 30 of the second.
@pytest.mark.parametrize("memory", [30.0, 35.0, 50.0, 1000.0])
@pytest.mark.parametrize("width", [5, 500])
def test_orders_are_sound_and_keep_to_the_memory(memory, width):
    setting = setting_of([3.0, 1.0, 1.0, 2.0, 2.0], backward=True, saved=10, memory=memory)
    walk, found = searched(setting, [0, 1, 0, 1, 1], width)
    assert walk.excess == 0
    assert walk.step_s == pytest.approx(found.end_s)
    validate(draft(walk)[0])


def test_no_order_where_a_microbatch_does_not_fit():
    setting = setting_of([1.0] * 4, backward=True, saved=10, memory=29.0)
    _, found = searched(setting, [0, 1, 1, 1])
    assert found.end_s == float("inf")
    assert found.complete
    assert found.depth < 3 * 4 * 4


@pytest.mark.parametrize("seed", range(12))
def test_complete_search_finds_the_fastest_of_all_orders(seed):
    draw = random.Random(seed)
    times = [(draw.randint(1, 9), draw.randint(1, 9), draw.randint(0, 9)) for _ in range(3)]
    saved, workspace = ([draw.randint(low, 9) for _ in times] for low in (1, 0))
    edges = [(0, 1, draw.randint(0, 4)), (1, 2, draw.randint(0, 4)), *([(0, 2, 1)] if seed % 3 == 0 else [])]
    device_of = draw.choice([(0, 1, 0), (0, 1, 1), (0, 0, 1)])
    memory = draw.choice([20, 25, 30, 1000]) + max(saved)
    nodes = tuple(
        OpNode(f"n{i}", *map(float, times[i]), saved_bytes=saved[i], workspace_bytes=workspace[i]) for i in range(3)
    )
    graph = OpGraph(nodes, tuple(OpEdge(f"n{a}", f"n{b}", size) for a, b, size in edges))
    setting = one_setting(graph, fully_connected(2, memory, 1.0, 1.0), 2, (memory,) * 2, None)
    delays = [
        (a, b, apart * (1 + size), apart * (1 + max(size, 1)))
        for a, b, size in edges
        for apart in [device_of[a] != device_of[b]]
    ]
    least = fastest_by_trial(times, device_of, delays, saved, workspace, (memory,) * 2, 2)
    walk, found = searched(setting, device_of)
    assert found.complete
    assert found.end_s == least
    assert least == float("inf") or walk.step_s == least
    _, none = searched(setting, device_of, stop_s=least)
    assert none.complete
    assert none.end_s == float("inf")


def test_wider_beams_are_no_slower_and_know_whether_anything_was_dropped():
    setting = setting_of([3.0, 1.0, 4.0, 1.0], backward=True, saved=10, memory=45.0)
    narrow, medium, wide = (searched(setting, [0, 1, 1, 0], width)[1] for width in (1, 5, 5000))
    assert narrow.end_s >= medium.end_s >= wide.end_s
    assert not narrow.complete
    assert wide.complete


def test_search_ends_after_the_given_number_of_states():
    setting = setting_of([3.0, 1.0, 4.0, 1.0, 5.0, 2.0], backward=True, microbatches=6)
    _, found = searched(setting, [0, 1, 0, 1, 1, 0], 10, most=50)
    assert found.end_s == float("inf")
    assert not found.complete
    assert 40 < found.states <= 50


def test_orders_are_repeatable():
    setting = setting_of([3.0, 1.0, 4.0, 1.0], backward=True)
    first, again = (searched(setting, [0, 1, 1, 0], 20)[0] for _ in range(2))
    assert all(itertools.starmap(np.array_equal, zip(first.best, again.best, strict=True)))


@pytest.mark.slow
def test_compiling_ahead_includes_beam_searches():
    lines = (
        "from panpipe.core.search.beam.beam_orders import _search",
        "from panpipe.core.search.compiling import compile_search",
        "compile_search()",
        "assert _search.signatures",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
