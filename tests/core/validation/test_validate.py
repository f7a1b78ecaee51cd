"""Validation: what it refuses and in which words, what it warns of, and that what it accepts runs to the end."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from panpipe.core.actions import COMPUTE_KINDS, Action, Kind
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.cluster.mesh import Mesh
from panpipe.core.costs.costs import StageCosts, StageEdge
from panpipe.core.errors import InfeasibleError, PanpipeError, RequestError
from panpipe.core.lowering.lowering import lower
from panpipe.core.plan.plan import MemoryPolicy, TiedWeight
from panpipe.core.validation.validate import validate
from panpipe.simulators.run import simulate

from ...support.plans import UNIT, orders, plan_of, plans

PLAN = plan_of(orders("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), (0, 1))


def with_orders(*rows):
    return attrs.evolve(PLAN, device_actions=orders(*rows))


def with_costs(**changes):
    return attrs.evolve(PLAN, prediction=attrs.evolve(PLAN.prediction, costs=(attrs.evolve(UNIT, **changes), UNIT)))


def test_deadlock_is_reported_as_its_cycle():
    with pytest.raises(RequestError) as error:
        validate(with_orders("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))
    text = str(error.value)
    links = text.removeprefix("the plan deadlocks: ").split(";")[0].split(", ")
    waiting = [link.split(" waits for ")[0] for link in links]
    awaited = [link.split(" waits for ")[1].split(" (")[0] for link in links]
    assert awaited == waiting[1:] + waiting[:1]
    # In full: 0B0 needs 1B0, which runs after 1F1, which needs 0F1, which runs after 0B0.
    assert set(waiting) == {"0B0", "1B0", "1F1", "0F1"}


def test_an_idle_device_is_a_warning():
    assert validate(plan_of(orders("0F0 0B0", ""), (0,))).warnings == ("device 1 holds no stage and idles",)


def test_lowered_lists_are_checked_themselves():
    lowered = list(lower(PLAN))
    assert validate(PLAN, lowered=lowered).warnings == ()
    with pytest.raises(RequestError, match="device 0 issues nothing where the plan has 0STEP: between sends"):
        validate(PLAN, lowered=[lowered[0][:-1], lowered[1]])
    with pytest.raises(RequestError, match="1 lowered lists for 2 devices"):
        validate(PLAN, lowered=lowered[:1])
    without = tuple(action for action in lowered[1] if action != Action(1, Kind.RECV_F, 1, 0))
    with pytest.raises(RequestError, match="device 1 issues no 1RECV_F1<0: add it"):
        validate(PLAN, lowered=[lowered[0], without])


def test_a_tied_weight_without_its_reduction_is_refused():
    plan = attrs.evolve(PLAN, tied=(TiedWeight("w", (0, 1), 1),))
    assert validate(plan).warnings == ()
    with pytest.raises(RequestError, match="device 0 issues 0STEP where the plan has 0REDUCE_TIED"):
        validate(plan, lowered=lower(PLAN))


# Memory: UNIT saves 100 bytes a microbatch and works in 7, messages have 10.


def test_exceeded_limit_is_reported_with_device_action_bytes_and_change():
    with pytest.raises(InfeasibleError) as error:
        validate(PLAN, memory_limits=[206, 1000])
    assert str(error.value) == (
        "device 0 holds 207 bytes at 0F1 and has 206: 1 too many; give the device 1 bytes more, or recompute "
        "stage 0 (it keeps 0 bytes of a microbatch then, and saves 100 now), or start 1 fewer of the 2 microbatches "
        "that stage 0 holds then (100 bytes each)"
    )


def test_exceeded_limit_with_one_microbatch():
    with pytest.raises(
        InfeasibleError, match=r"cut the batch into more microbatches \(stage 1 saves 100 bytes of each"
    ):
        validate(PLAN, memory_limits=[1000, 100])


def test_exceeded_limit_by_state_alone():
    plan = with_costs(parameter_bytes=300, gradient_bytes=300)
    with pytest.raises(InfeasibleError, match=r"optimizer state alone are 100 too many; move operators"):
        validate(plan, memory_limits=[500, 1000])


def test_communication_buffers_over_the_limit_are_a_warning():
    report = validate(PLAN, memory_limits=[207, 1000])
    assert len(report.warnings) == 1
    assert "device 0" in report.warnings[0]
    assert "communication buffers" in report.warnings[0]


def test_limits_need_costs_and_one_for_each_device():
    with pytest.raises(RequestError, match="1 memory limits for 2 devices"):
        validate(PLAN, memory_limits=[1])
    with pytest.raises(RequestError, match="holds no costs"):
        validate(attrs.evolve(PLAN, prediction=None), memory_limits=[1, 1])
    assert validate(attrs.evolve(PLAN, prediction=None)).peak_memory_bytes == ()


# Laws


@given(plans(), st.booleans())
def test_valid_plan_runs_to_the_end(plan, eager):
    report = validate(plan)
    result = simulate(plan, eager=eager)
    assert sum(event.action.kind in COMPUTE_KINDS for event in result.trace.events) == sum(
        map(len, plan.device_actions)
    )
    if not eager:  # own links: nothing is shared, so that validation predicts the very peaks
        assert report.peak_memory_bytes == pytest.approx(result.peak_memory_bytes)
        assert report.peak_saved_bytes == result.peak_saved_bytes


def mutated(data, lists):
    """One action swapped with another, dropped, duplicated or moved to another device."""
    lists = [list(actions) for actions in lists]
    places = [(device, i) for device, actions in enumerate(lists) for i in range(len(actions))]
    device, i = data.draw(st.sampled_from(places))
    other, j = data.draw(st.sampled_from(places))
    how = data.draw(st.sampled_from(["neighbours", "swap", "drop", "duplicate", "move"]))
    if how == "neighbours":
        j = min(i + 1, len(lists[device]) - 1)
        lists[device][i], lists[device][j] = lists[device][j], lists[device][i]
    elif how == "swap":
        lists[device][i], lists[other][j] = lists[other][j], lists[device][i]
    elif how == "drop":
        del lists[device][i]
    elif how == "duplicate":
        lists[other].insert(j, lists[device][i])
    else:
        action = lists[device].pop(i)
        lists[other].insert(min(j, len(lists[other])), action)
    return tuple(map(tuple, lists))


@given(plans(), st.data())
def test_a_mutated_order_is_refused_or_runs(plan, data):
    plan = attrs.evolve(plan, device_actions=mutated(data, plan.device_actions))
    try:
        validate(plan)
    except PanpipeError:
        return
    assert simulate(plan).step_s > 0


@given(plans(), st.data())
def test_mutated_lowered_lists_are_refused_or_run(plan, data):
    lowered = mutated(data, lower(plan))
    try:
        validate(plan, lowered=lowered)
    except PanpipeError:
        return
    assert simulate(plan, lowered=lowered).step_s > 0


def test_the_message_order_of_a_hand_edited_plan_cannot_hang():
    """Receives in another order than their sends would wait for each other for ever."""
    plan = plan_of(
        orders("0F0 1F0 1B0 0B0", "2F0 3F0 3B0 2B0"),
        (0, 0, 1, 1),
        edges=[StageEdge(0, 2, 1, 0), StageEdge(1, 3, 1, 0)],
        costs=[StageCosts(1.0, 1.0, 1.0)] * 4,
    )
    first, second = lower(plan, 0)
    swapped = orders(
        " ".join(map(str, second)).replace("2RECV_F0<0 ", "").replace("3RECV_F0<1", "3RECV_F0<1 2RECV_F0<0")
    )
    with pytest.raises(RequestError, match="both ends have one order"):
        validate(plan, lowered=[first, swapped[0]])


RECOMPUTING = attrs.evolve(PLAN, memory=MemoryPolicy(recompute=(0,)))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("0RECOMPUTE0 0B0", "0B0", "device 0 issues 0B0 where the plan has 0RECOMPUTE0"),
        ("0F0", "0RECOMPUTE0 0F0", "device 0 issues 0RECOMPUTE0 where the plan has 0F0"),
        ("1B0", "1RECOMPUTE0 1B0", "device 1 issues 1RECOMPUTE0 where the plan has 1B0"),
        ("1STEP", "1REDUCE_GRAD 1STEP", "device 1 issues 1REDUCE_GRAD where the plan has 1STEP"),
        ("0B0 ", "0B0 0OFFLOAD0 ", "device 0 issues 0OFFLOAD0 where the plan has 0RECOMPUTE1"),
    ],
)
def test_lists_by_hand_have_what_lowering_places(old, new, said):
    rows = [" ".join(map(str, actions)).replace(old, new) for actions in lower(RECOMPUTING)]
    with pytest.raises(RequestError, match=said):
        validate(RECOMPUTING, lowered=orders(*rows))


def test_replicas_are_checked_with_the_memory_of_the_smaller_one():
    cluster = fully_connected(4, 1000, float("inf"), 0.0)
    small = attrs.evolve(cluster, devices=(*cluster.devices[:3], attrs.evolve(cluster.devices[3], memory_bytes=50)))
    plan = plan_of(orders("0F0 0B0", "1F0 1B0"), (0, 1), data=2, cluster=cluster)
    assert validate(plan).peak_saved_bytes == (100, 100)
    with pytest.raises(InfeasibleError, match="device 1 holds 107 bytes at 1F0 and has 50"):
        validate(attrs.evolve(plan, prediction=attrs.evolve(plan.prediction, cluster=small)))
    with pytest.raises(RequestError, match="device 1 twice"):
        validate(attrs.evolve(plan, mesh=Mesh(2, 2, ((0, 1), (1, 2)))))
