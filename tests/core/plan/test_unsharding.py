"""Parameters that replicas share: where lowering gathers and frees them, what waits, what is held, what is refused."""

from collections.abc import Sequence

import pytest
from attrs import evolve
from panpipe.core.actions import Kind, parse_action
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.errors import RequestError
from panpipe.core.lowering.derive import first_microbatches, forward_only, reordered
from panpipe.core.lowering.lowering import lower
from panpipe.core.plan.memory_policy import StageUnshard, UnshardedRun
from panpipe.core.plan.plan import MemoryPolicy, Plan, parse_plan, plan_json
from panpipe.core.policies.replicas import whole_at_once
from panpipe.core.search.problem.oracle import longest_path
from panpipe.core.validation.validate import validate
from panpipe.simulators.run import simulate

from ...support.plans import orders, plan_of, scheduled
from ...support.sharing import COST, shared

HERE = (Kind.UNSHARD, Kind.RESHARD, Kind.F, Kind.B, Kind.RECOMPUTE)


def runs(stage: int, *given: tuple[str | None, str, str]) -> StageUnshard:
    found = (tuple(text and parse_action(text) for text in one) for one in given)
    return StageUnshard(stage, tuple(UnshardedRun(*one) for one in found))  # type: ignore[arg-type]


UNSHARD = (
    runs(0, (None, "0F0", "0F1"), ("1B0", "0B0", "0B1")),
    runs(1, ("0F0", "1F0", "1B1")),
)


def two_stages(unshard: Sequence[StageUnshard] = UNSHARD) -> Plan:
    """Two stages on one device, of two replicas; each all-gather takes 80 / 2 bytes at 40 bytes/s."""
    plan = plan_of(orders("0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"), (0, 0), data=2, costs=[COST] * 2)
    plan = evolve(plan, shard=("parameters",) * 2, memory=evolve(plan.memory, unshard=tuple(unshard)))
    cluster = fully_connected(2, 10**6, 40.0, 0.0)
    return evolve(plan, edges=(), prediction=evolve(plan.predicted, cluster=cluster, costs=(COST, COST)))


def text(plan: Plan, device: int = 0) -> str:
    return " ".join(str(action) for action in lower(plan)[device] if action.kind in HERE)


def test_simulator_oracle_and_validation_agree_on_time_and_memory() -> None:
    plan = two_stages()
    result, report = simulate(plan), validate(plan)
    score = longest_path(plan, plan.predicted.costs, plan.predicted.cluster)
    # Each all-gather takes a second, as each of the four sums does.
    assert result.step_s == pytest.approx(score.step_s)
    # Of both stages 1/2 of everything, and two slots; at 1F1 the parameters of one, and four saved microbatches.
    held = 2 * (40 + 40 + 80) + 2 * 5
    assert report.peak_memory_bytes[0] == score.peak_memory_bytes[0] == held + 80 + 400
    assert max(result.timelines[0].working) == held + 80 + 400
    assert result.peak_by_kind[0]["parameters"] == 80 + 160
    first = next(task for task in result.tasks if str(task.action) == "0UNSHARD0")
    assert (first.start_s, first.end_s, first.bytes) == (0.0, 1.0, 80)
    assert result.operation_times[0][0][0] == 1.0
    spent = sum(end - start for start, end in zip(*result.operation_times[0], strict=True))
    assert sum(result.bubbles[0].values()) + spent == pytest.approx(result.step_s)
    samples = [s.bytes for s in result.trace.memory if s.device == 0 and s.kind == "parameters"]
    assert (samples[0], max(samples), samples[-1]) == (160, 240, 80)


def test_runs_of_a_stage_that_shares_no_parameters_are_refused() -> None:
    plan = evolve(two_stages(), shard=("gradients", "parameters"))
    with pytest.raises(RequestError, match=r"names stage 0, whose replicas do not share parameters: remove it"):
        validate(plan)
    plan = evolve(forward_only(two_stages()), memory=two_stages().memory)
    with pytest.raises(RequestError, match=r"memory.unshard names stage 0, whose replicas do not share parameters"):
        validate(plan)
    with pytest.raises(RequestError, match=r"the plan is forward only and has shard: gradients"):
        validate(evolve(plan, shard=("gradients", "none"), memory=MemoryPolicy()))


def test_forwards_hold_the_parameters_of_one_stage_at_a_time_where_the_plan_never_holds_all() -> None:
    in_turn = (UNSHARD[0], runs(1, ("0F1", "1F0", "1B1")))
    plan = two_stages((runs(0, (None, "0F0", "0F1"), ("1B1", "0B0", "0B1")), in_turn[1]))
    assert whole_at_once(two_stages())  # both, while the second one is gathered
    assert not whole_at_once(plan)
    assert text(forward_only(two_stages())) == "1F0 1F1 0F0 0F1"  # it has no edges
    forwards = forward_only(plan)
    validate(forwards)
    assert text(forwards) == "0UNSHARD0 0F0 0F1 0RESHARD0 1UNSHARD0 1F0 1F1 1RESHARD0"
    assert parse_plan(plan_json(forwards), "the plan") == forwards
    fewer = first_microbatches(forwards, 1)
    assert text(fewer) == "0UNSHARD0 0F0 0RESHARD0 1UNSHARD0 1F0 1RESHARD0"
    assert reordered(fewer) == fewer
    result = simulate(evolve(forwards, prediction=plan.prediction))
    assert result.step_s == pytest.approx(2 * 1.0 + 4 * COST.forward_s)  # an all-gather takes a second
    assert result.peak_by_kind[0]["parameters"] == 80 + 80


@pytest.mark.parametrize("name", ["interleaved-1f1b", "zb-v"])
def test_forwards_by_stages_of_every_placement_run_to_the_end(name: str) -> None:
    plan = shared(scheduled(name, 2, 4, 2, data=2), "parameters")
    assert not whole_at_once(plan)
    forwards = forward_only(plan)
    validate(forwards)
    for count in (1, 3):
        validate(first_microbatches(forwards, count))


def test_fewer_microbatches_keep_all_runs() -> None:
    one = first_microbatches(two_stages(), 1)
    assert one.memory.unshard == (
        runs(0, (None, "0F0", "0F0"), ("1B0", "0B0", "0B0")),
        runs(1, ("0F0", "1F0", "1B0")),
    )
    validate(one)
    short = (runs(0, (None, "0F0", "0F0"), ("0F0", "0F1", "0F1"), ("1B1", "0B0", "0B1")), UNSHARD[1])
    none_left = first_microbatches(two_stages(short), 1)
    assert none_left.memory.unshard[0].runs[1] == UnshardedRun(parse_action("0F0"), None, None)
    validate(none_left)
    assert "0RESHARD0 0UNSHARD1 1UNSHARD0 0RESHARD1 1F0" in text(none_left)
