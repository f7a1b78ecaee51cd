"""Steps by hand: sums over tensor ranks, idle time by cause, and peaks in traces."""

import json
import tempfile
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.cluster.cluster import Cluster, Device, fully_connected
from panpipe.core.cluster.mesh import Mesh
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.costs import StageCosts, StageEdge
from panpipe.core.costs.reductions import TensorReductions
from panpipe.core.errors import RequestError
from panpipe.core.plan.memory_policy import StageOffload, Storage
from panpipe.core.plan.plan import MemoryPolicy, TiedWeight
from panpipe.core.report.data import ReportFacts, report_data
from panpipe.core.search import longest_path
from panpipe.core.trace.compare import TOTAL, peak_memory
from panpipe.core.trace.perfetto import write_trace
from panpipe.core.trace.perfetto_reader import read_trace
from panpipe.core.trace.trace import MEMORY_KINDS
from panpipe.core.validation.structure import check_structure
from panpipe.simulators.bubbles import CAUSES
from panpipe.simulators.run import alone_s, simulate

from ..support.plans import offloading_plans, orders, plan_of, plans

# All-reduces over tensor ranks in a simulated step, by hand.


def switch(count, bytes_per_s=100.0):
    """Devices with a port each into one switch, without latency."""
    names = [f"gpu{number}" for number in range(count)]
    links = tuple(Link(name, "switch", bytes_per_s, 0.0) for name in names)
    return Cluster(tuple(Device(name, 10**6) for name in names), ("switch",), links)


# Two ranks: a ring moves 2 · (2 − 1) ÷ 2 of the bytes over each edge, so 200 bytes at 100 bytes/s take 2 s.
SUMS = TensorReductions(2, 2, 200, 200, 2.0, 2.0, ranks=2)
COST = StageCosts(3.0, 3.0, 1.0, reductions=SUMS)


def two_stages(*rows, size=0, **changes):
    plan = plan_of(
        orders(*rows), (0, 1), costs=[COST] * 2, edges=(StageEdge(0, 1, size, max(size, 1)),), cluster=switch(4)
    )
    return evolve(plan, mesh=Mesh(2, 1, tensor=2), **changes)


def test_step_without_contention_is_that_of_the_longest_path():
    plan = two_stages("0F0 0B0", "1F0 1B0")
    result = simulate(plan)
    ends = [end for _, ends in result.operation_times for end in ends[:2]]
    assert ends == pytest.approx([3.0, 14.01, 6.0, 10.0])  # the gradient of one byte takes 0.01 s
    assert longest_path(plan, plan.prediction.costs, plan.prediction.cluster).step_s == pytest.approx(result.step_s)


def test_all_reduce_shares_links_with_messages():
    # The message of 0F0 (300 bytes) leaves at 3 s; the all-reduce of 0F1 (1 s of computation before it) uses the same
    # ports from 4 s on: 200 bytes at half the rate until the message has left, at 8 s. It ends there, in place of 6 s.
    plan = two_stages("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", size=300, microbatches=2)
    (starts, ends), _ = simulate(plan).operation_times
    assert (starts[:2], ends[:2]) == ([0.0, 3.0], [3.0, pytest.approx(8.0)])
    alone = simulate(plan, sharing=False)
    assert alone.operation_times[0][1][1] == pytest.approx(6.0)
    assert alone_s(plan, plan.prediction.costs, alone.cluster) == pytest.approx(alone.step_s)


def test_recompute_repeats_the_all_reduces_of_the_forward():
    plan = two_stages("0F0 0B0", "1F0 1B0", memory=MemoryPolicy(recompute=(0, 1)))
    used = {(link.src, link.dst): link.bytes for link in simulate(plan).links}
    assert used["gpu0", "switch"] == 3 * 200


PLAN = two_stages("0F0 0B0", "1F0 1B0")


def with_costs(cost, mesh=PLAN.mesh):
    return evolve(PLAN, mesh=mesh, prediction=evolve(PLAN.prediction, costs=(cost,) * 2, cluster=switch(8)))


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (with_costs(COST, Mesh(2)), "are of 2 tensor ranks and the mesh has 1: plan again"),
        (with_costs(COST, Mesh(2, tensor=4)), "are of 2 tensor ranks and the mesh has 4: plan again"),
        (
            with_costs(evolve(COST, reductions=None)),
            "the mesh has 2 ranks at a position and the costs are of stages without",
        ),
        (
            with_costs(evolve(COST, reductions=evolve(SUMS, forward_s=3.5))),
            "reductions.forward_s of stage 0 is 3.5",
        ),
        (
            with_costs(evolve(COST, reductions=evolve(SUMS, forward_bytes=-1))),
            "forward_bytes of stage 0 is -1",
        ),
        (
            evolve(PLAN, memory=MemoryPolicy(offload=(StageOffload(0, (Storage("a", 1),), ()),))),
            "memory.offload is not empty and the mesh has 2 ranks a position",
        ),
    ],
)
def test_hand_edit_is_refused(plan, said):
    with pytest.raises(RequestError, match=said):
        check_structure(plan)


# Why devices idle, by hand.


def test_idle_time_of_two_stages_by_cause():
    # Device 0: 0F0 0–1, B's gradient is sent at 5.5 and there at 7, 0B0 7–9, sum of the tied weight until 11.5, STEP.
    # Device 1: 1F0 2.5–3.5, 1B0 3.5–5.5, sum until 11.5, STEP until 12.5; device 0's STEP ends at 11.75.
    plan = plan_of(
        orders("0F0 0B0", "1F0 1B0"),
        (0, 1),
        costs=[StageCosts(1.0, 1.0, 1.0, optimizer_s=0.25), StageCosts(1.0, 1.0, 1.0, optimizer_s=1.0)],
        cluster=fully_connected(2, 10**6, 10.0, 0.5),
        tied=(TiedWeight("embedding", (0, 1), 20),),
    )
    first, second = simulate(plan).bubbles
    assert list(first) == list(CAUSES)
    none = dict.fromkeys(CAUSES, 0.0)
    assert first == {**none, "dependency": 4.5, "communication": 1.5, "reduction": 2.5, "cool-down": 0.75}
    assert second == {**none, "warm-up": 2.5, "reduction": 6.0}


# The memory samples of a simulated trace: they show every peak of the result.


def highest_of_counters(text: str, devices: int) -> list[float]:
    """Per device the highest sum over the kinds of its memory counter, whose values at one time count together."""
    highest = []
    for device in range(devices):
        held: dict[str, float] = {}
        sums: dict[float, float] = {}
        for event in json.loads(text)["traceEvents"]:
            if (event["ph"], event["name"], event["pid"]) == ("C", "memory", device):
                held |= event["args"]
                sums[float(event["ts"])] = sum(held.values())
        highest.append(max(sums.values(), default=0.0))
    return highest


@settings(max_examples=60)
@given(st.one_of(plans(), offloading_plans()), st.booleans())
def test_samples_show_every_peak_of_the_result(plan, eager):
    result = simulate(plan, eager=eager)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        write_trace(result.trace, path)
        trace = read_trace(path)
        text = path.read_text(encoding="utf-8")
    peaks = peak_memory(trace, MEMORY_KINDS)
    assert [peak[TOTAL] for peak in peaks] == pytest.approx(result.peak_memory_bytes)
    assert [{kind: peak[kind] for kind in MEMORY_KINDS} for peak in peaks] == [
        pytest.approx(of_kinds) for of_kinds in result.peak_by_kind
    ]
    assert highest_of_counters(text, plan.mesh.ranks) == pytest.approx(result.peak_memory_bytes)
    held = report_data(plan, result.trace, None, ReportFacts())["traces"][0]["memory"]["held"]
    assert [max(map(sum, rows)) for rows in held] == pytest.approx(result.peak_memory_bytes, abs=3)


def test_a_peak_within_an_instant_is_a_sample_of_its_own():
    # The second F allocates at the time at which the first stage's B frees: both stages run without taking any time.
    free = StageCosts(0.0, 0.0, 0.0, saved_bytes=100)
    plan = plan_of(orders("0F0 0F1 0B0 0B1"), (0,), costs=[free])
    result = simulate(plan)
    saved = [(sample.time_s, sample.bytes) for sample in result.trace.memory if sample.kind == "saved"]
    assert saved == [(0.0, 200.0), (1e-15, 0.0)]
    assert result.peak_saved_bytes == (200.0,)
