"""The compiled evaluation equals ``longest_path``, for stages of any cuts of any graph and for measured stages."""

import itertools

import pytest
from attrs import evolve
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st
from panpipe.core.cluster.cluster import Cluster, Device
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.costs import stage_costs
from panpipe.core.costs.graph import OpEdge, OpGraph, OpNode
from panpipe.core.costs.message_overhead import FREE, MessageLine, with_message_times
from panpipe.core.costs.partition import stages_of
from panpipe.core.errors import RequestError
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import families
from panpipe.core.search import longest_path
from panpipe.core.search.annealing.walk import start_walk
from panpipe.core.search.finalize import draft
from panpipe.core.search.problem.assemble import with_replicas
from panpipe.core.search.problem.setting import Setting

RATE, LATENCY = 4.0, 0.5
NUMBER = st.integers(0, 9)
MESSAGE = st.sampled_from([FREE, MessageLine(0.25), MessageLine(0.5, 0.125)])


@st.composite
def graphs(draw, least=3, most=10):
    size = draw(st.integers(least, most))
    nodes = tuple(
        OpNode(
            f"n{i}", draw(NUMBER), draw(NUMBER), draw(NUMBER), draw(NUMBER), draw(NUMBER), draw(NUMBER) + 18,
            draw(NUMBER), draw(NUMBER), ("w",) if draw(st.integers(0, 3)) == 0 else (),
        )
        for i in range(size)
    )  # fmt: skip
    pairs = draw(st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)), max_size=12))
    sizes = draw(st.lists(NUMBER, min_size=size, max_size=size))
    edges = tuple(
        OpEdge(f"n{min(a, b)}", f"n{max(a, b)}", sizes[min(a, b)], draw(st.booleans()), draw(st.integers(0, 1)))
        for a, b in pairs
        if a != b
    )
    return OpGraph(nodes, edges)


@st.composite
def schedules(draw, stages):
    """Any schedule of at most ``stages`` stages, with any of its parameters."""
    family = draw(st.sampled_from([f for f in families().values() if f.name not in ("building-block", "v-min")]))
    chunks = draw(st.sampled_from(family.chunks or (1, 2, 3)))
    devices = draw(st.integers(1, max(stages // chunks, 1)))
    problem = ScheduleProblem(devices, draw(st.integers(1, 6)), chunks)
    candidates = [dict(parameters) for parameters in family.candidates(problem)]
    assume(candidates)
    try:
        return family.build(problem, **draw(st.sampled_from(candidates)))
    except RequestError:
        reject()


def uneven(devices):
    """A cluster with different rates and latencies between its devices."""
    links = [
        Link(f"d{a}", f"d{b}", RATE * (1 + (a + b) % 3), LATENCY * (a + 1))
        for a, b in itertools.combinations(range(devices), 2)
    ]
    return Cluster(tuple(Device(f"d{i}", 10**6) for i in range(devices)), (), tuple(links))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_evaluation_of_stages_of_any_cuts_equals_longest_path(data):
    graph = data.draw(graphs())
    schedule = data.draw(schedules(len(graph.nodes)))
    stages, devices = len(schedule.placement), len(schedule.device_actions)
    if stages > len(graph.nodes):
        return
    inner = data.draw(
        st.lists(st.integers(1, len(graph.nodes) - 1), unique=True, min_size=stages - 1, max_size=stages - 1)
    )
    cuts = (0, *sorted(inner), len(graph.nodes))
    again = tuple(s for s in range(stages) if data.draw(st.booleans()))
    order = data.draw(st.permutations(range(devices)))
    cluster = uneven(devices)
    slow = evolve(graph, nodes=tuple(evolve(node, forward_s=2 * node.forward_s) for node in graph.nodes))
    kinds = tuple(data.draw(st.integers(0, 1)) for _ in range(devices))
    setting = Setting(
        (graph, slow), cluster, (tuple(order),), schedule.microbatches, kinds, (1e6,) * devices, {"w": 5},
        message=data.draw(MESSAGE),
    )  # fmt: skip
    walk = start_walk(setting, schedule, cuts, split=False)
    walk.best.recompute[list(again)] = True
    walk.evaluate()
    plan, costs = draft(walk)
    names = stages_of(graph, cuts)
    tables = [stage_costs(each, names) for each in (graph, slow)]
    programs = tuple(tables[kinds[stage.device]][stage.index] for stage in plan.stages)
    expected = programs
    if setting.message != FREE:
        expected = with_message_times(programs, plan.placement, plan.edges, setting.message)
    assert costs == with_replicas(graph, expected, plan.tied)
    assert plan.memory.recompute == again
    score = longest_path(plan, costs, cluster)
    assert walk.step_s == pytest.approx(score.step_s, rel=1e-12, abs=1e-12)
    assert [walk.peaks[order.index(d)] for d in range(devices)] == pytest.approx(score.peak_memory_bytes, rel=1e-12)
