"""Times of programs from rehearsed steps, and a profile for other schedules of the same stages."""

import pytest
import torch
from attrs import evolve
from panpipe.core.actions import parse_action
from panpipe.core.costs.costs import StageCosts, StageEdge
from panpipe.core.costs.message_overhead import MessageTimes
from panpipe.core.trace.trace import COMPUTE_QUEUE, Trace, TraceEvent
from panpipe.runtimes.batch.example import Example
from panpipe.runtimes.batch.microbatches import split_batch
from panpipe.runtimes.engine.step_data import StepRecord
from panpipe.runtimes.engine.tracing import message_times
from panpipe.runtimes.launch.team import ThreadTeam
from panpipe.runtimes.optimizer.training import Training
from panpipe.runtimes.pipeline import Pipeline
from panpipe.runtimes.planning.rehearsed import Rehearsal, rehearsed_costs, rehearsed_profile

from ...support.cuts import captured, even_plan
from ...support.models import CASES
from ...support.plans import orders, plan_of

KNOWN = StageCosts(1.0, 1.0, 3.0, backward_s=5.0, saved_bytes=7)


def trace(*events):
    """A step in which these actions took these times."""
    found = tuple(TraceEvent(0, COMPUTE_QUEUE, parse_action(name), 0.0, seconds, 0) for name, seconds in events)
    return Trace("measured", "", 1, found, (), 1.0)


def costs_from(*traces, quantile=0.5, known=KNOWN):
    plan = plan_of(orders("0F0 0B0"), (0,), costs=[known])
    return rehearsed_costs(plan, [known], traces, quantile)[0]


def test_program_time_is_its_mean_over_microbatches_and_a_quantile_over_steps():
    steps = [trace(("0F0", 1.0), ("0F1", 3.0)), trace(("0F0", 4.0), ("0F1", 4.0)), trace(("0F0", 6.0), ("0F1", 12.0))]
    assert costs_from(*steps).forward_s == 4.0
    assert costs_from(*steps, quantile=0.25).forward_s == 3.0


def test_program_that_was_not_rehearsed_is_scaled_like_the_rest_of_its_backward():
    assert costs_from(trace(("0B0", 10.0))) == evolve(
        KNOWN, backward_s=10.0, backward_input_s=2.0, backward_weight_s=6.0
    )
    halves = costs_from(trace(("0I0", 3.0), ("0W0", 3.0)))
    assert (halves.backward_input_s, halves.backward_weight_s, halves.backward_s) == (3.0, 3.0, 7.5)


def test_costs_that_no_step_shows_are_kept():
    assert costs_from(trace(("0F0", 2.0))) == evolve(KNOWN, forward_s=2.0)
    free = StageCosts(1.0, 0.0, 0.0)
    assert costs_from(trace(("0B0", 2.0)), known=free).full_backward_s == 2.0


def test_message_times_of_both_ends_exclude_waits():
    sent, got = parse_action("0SEND_F0"), parse_action("1RECV_F0")
    first = StepRecord({}, events=[(sent, "send 1", 0, 2_000_000_000, 64), (sent, "send 1", 0, 4_000_000_000, 64)])
    second = StepRecord({}, events=[(got, "receive 0", 0, 1_000_000_000, 64)], arrivals={got: 99_000_000_000})
    assert message_times([first, second]) == MessageTimes({64: 3.0}, {64: 1.0})


def test_profile_gives_costs_for_another_schedule_and_placement():
    edges = [StageEdge(0, 1, 10, 10)]
    rehearsed = plan_of(orders("0F0 0B0", "1F0 1B0"), (0, 1), costs=[KNOWN] * 2, edges=edges)
    seen = Rehearsal(trace(("0F0", 2.0), ("1F0", 3.0)), MessageTimes({10: 0.5}, {10: 0.25}))
    profile = rehearsed_profile([(rehearsed, [KNOWN] * 2, [seen])], 0.5)
    split = plan_of(orders("0F0 0I0 0W0", "1F0 1I0 1W0"), (0, 1), costs=[KNOWN] * 2, edges=edges)
    assert [cost.forward_s for cost in profile.of(split)] == [2.5, 3.25]
    together = plan_of(orders("0F0 1F0 1B0 0B0"), (0, 0), costs=[KNOWN] * 2, edges=edges)
    assert [cost.forward_s for cost in profile.of(together)] == [2.0, 3.0]
    with pytest.raises(KeyError):
        profile.of(plan_of(orders("0F0 0B0"), (0,), costs=[KNOWN]))


def test_rehearsals_record_programs_and_messages_and_traced_steps_record_saved_tensors():
    case = CASES["batchnorm with a skip"]
    operators = captured(case, torch.float32, 8, 4)
    plan = even_plan(operators, 2, 4)
    batch = case.batch(8, torch.float32)
    example = Example(case.model(torch.float32), case.step, split_batch(batch, 4)[0], operators)
    pipe = Pipeline(example, plan, ThreadTeam(2), Training(optimizer=torch.optim.AdamW))
    seen = pipe.rehearse(batch, 2)
    assert all(not one.trace.memory and one.messages.send.keys() == one.messages.receive.keys() for one in seen)
    sizes = {edge.bytes for edge in plan.edges} | {edge.gradient_bytes for edge in plan.edges}
    assert all(one.messages.send.keys() == sizes - {0} for one in seen)
    assert {str(e.action) for e in seen[0].trace.events if e.queue == COMPUTE_QUEUE} >= {"0F0", "1B3"}
    assert pipe.trace_step(batch)[1].memory
