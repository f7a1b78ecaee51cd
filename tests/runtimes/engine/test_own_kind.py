"""A kind of action declared here, on a separate queue: validated, simulated and traced; refused without an instruction.

CHECKSUM adds up the saved tensors of a stage and microbatch after each F, and B waits for it. How a declared kind is
executed is in ``tests/core/policies/test_toy_policy.py``.
"""

import pytest
import torch
from panpipe.core.actions import Kind, declare_kind
from panpipe.core.costs.costs import StageCosts
from panpipe.core.errors import RequestError
from panpipe.core.plan.memory import Change, Memory, Moment, Size, Use
from panpipe.core.trace.perfetto import write_trace
from panpipe.core.trace.perfetto_reader import read_trace
from panpipe.core.validation.validate import validate
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.simulators.run import simulate

from ...support.cuts import captured, even_plan
from ...support.models import CASES
from ...support.own_queue import declared, own_queue
from ...support.parity import build
from ...support.plans import orders, plan_of

CHECKSUM = declare_kind("CHECKSUM")
QUEUE = "checksums"
KIND = own_queue(
    CHECKSUM,
    QUEUE,
    stages=lambda plan: () if plan.forward_only else range(len(plan.stages)),
    after=Kind.F,
    fence=(Kind.B, Kind.I),
    seconds=lambda cost: 1.5 * cost.forward_s,
    changes=(
        Change(Moment.START, Use.SAVED, Size.INPUT, 1, Memory.HOST),
        Change(Moment.END, Use.SAVED, Size.INPUT, -1, Memory.HOST),
    ),
)
COST = StageCosts(1.0, 1.0, 1.0, saved_bytes=100, input_bytes=8)
PLAN = plan_of(orders("0F0 0F1 0B0 0B1"), (0,), costs=[COST])
NAME, DTYPE = "tied gpt with dropout", torch.float32


@pytest.fixture(autouse=True)
def kind():
    with declared(KIND):
        yield


def test_declared_kind_in_a_wrong_place_is_refused():
    assert validate(PLAN).peak_saved_bytes == (200.0,)
    with pytest.raises(RequestError, match="device 0 issues 0F1 where the plan has 0CHECKSUM0"):
        validate(PLAN, lowered=orders("0F0 0F1 0CHECKSUM0 0CHECKSUM1 0B0 0B1 0STEP"))


def test_simulator_runs_a_declared_queue_next_to_compute_and_its_fence_waits(tmp_path):
    result = simulate(PLAN)
    # Checksums take 1.5 s, one after another: 1–2.5 and 2.5–4. 0B0 waits until 2.5; 0B1 is late anyway.
    assert result.operation_times == (([0.0, 1.0, 2.5, 4.5, 6.5], [1.0, 2.0, 4.5, 6.5, 6.5]),)
    events = [(str(e.action), e.start_s, e.end_s) for e in result.trace.events if e.queue == QUEUE]
    assert events == [("0CHECKSUM0", 1.0, 2.5), ("0CHECKSUM1", 2.5, 4.0)]
    timeline = result.timelines[0]
    held = dict(zip(timeline.times.tolist(), timeline.host.tolist(), strict=True))
    assert held == {0.0: 0.0, 1.0: 8.0, 2.0: 16.0, 2.5: 8.0, 4.5: 0.0, 6.5: 0.0}
    write_trace(result.trace, tmp_path / "trace.json")
    assert read_trace(tmp_path / "trace.json") == result.trace


def test_validation_times_memory_with_the_fence():
    """The timeline of validation is that of the simulator, where nothing is shared."""
    plan = plan_of(orders("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), (0, 1), costs=[COST] * 2)
    result, report = simulate(plan), validate(plan)
    assert report.peak_memory_bytes == result.peak_memory_bytes
    assert report.peak_saved_bytes == result.peak_saved_bytes == (200.0, 100.0)


def test_kind_without_a_registered_instruction_is_refused():
    case = CASES[NAME]
    plan = even_plan(captured(case, DTYPE, 8, 4), 2, 4)
    with pytest.raises(RequestError, match="and no instruction is registered for CHECKSUM: remove it, or register one"):
        build(ThreadTeam(2), NAME, DTYPE, 8, plan, 4).step(case.batch(8, DTYPE))
