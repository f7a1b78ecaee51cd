"""The memory samples of a simulated trace: they show every peak of the result."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.costs.costs import StageCosts
from panpipe.core.report.data import ReportFacts, report_data
from panpipe.core.trace.compare import TOTAL, peak_memory
from panpipe.core.trace.perfetto import write_trace
from panpipe.core.trace.perfetto_reader import read_trace
from panpipe.core.trace.trace import MEMORY_KINDS
from panpipe.simulators.run import simulate

from ..support.plans import offloading_plans, orders, plan_of, plans


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
