"""What a simulated step reports of its actions: which, when, and in which order."""

import pytest
from hypothesis import given, settings
from panpipe.core.cluster.cluster import fully_connected
from panpipe.core.costs.costs import StageCosts
from panpipe.core.lowering.lowering import lower
from panpipe.core.trace.callback import CallMoment
from panpipe.simulators.run import simulate

from ..support.plans import orders, plan_of, plans


def told(plan, **options):
    found = []
    result = simulate(plan, perform=lambda *happened: found.append(happened), **options)
    return result, found


def test_callbacks_of_two_stages_with_a_hop_and_a_recompute():
    plan = plan_of(
        orders("0F0 0B0", "1F0 1B0"),
        (0, 1),
        costs=[StageCosts(1.0, 1.0, 1.0)] * 2,
        cluster=fully_connected(2, 10**6, 10.0, 0.5),
        recompute=(0,),
    )
    _, found = told(plan)
    assert [f"{now_s:g} {device} {moment} {action}" for moment, device, action, now_s in found] == [
        "0 0 issue 0RECV_B0<1",
        "0 0 start 0F0",
        "0 1 issue 1RECV_F0<0",
        "1 0 end 0F0",
        "1 0 issue 0SEND_F0>1",
        "1 0 start 0RECOMPUTE0",
        "2 0 end 0RECOMPUTE0",
        "2.5 1 arrival 1RECV_F0<0",
        "2.5 1 start 1F0",
        "3.5 1 end 1F0",
        "3.5 1 start 1B0",
        "5.5 1 end 1B0",
        "5.5 1 issue 1SEND_B0>0",
        "5.5 1 start 1STEP",
        "5.5 1 end 1STEP",
        "7 0 arrival 0RECV_B0<1",
        "7 0 start 0B0",
        "9 0 end 0B0",
        "9 0 start 0STEP",
        "9 0 end 0STEP",
    ]


@given(plans())
@settings(max_examples=30)
def test_callback_is_called_for_every_lowered_action_in_order_without_changing_times(plan):
    result, found = told(plan)
    alone = simulate(plan)
    assert result.operation_times == alone.operation_times
    assert result.transfer_times == alone.transfer_times
    for device, actions in enumerate(lower(plan)):
        own = [(moment, action) for moment, where, action, _ in found if where == device]
        issued = [action for moment, action in own if moment in (CallMoment.ISSUE, CallMoment.START)]
        assert issued == list(actions)
        assert sum(moment is CallMoment.ARRIVAL for moment, _ in own) == sum(
            a.kind.value[:4] == "RECV" for a in actions
        )
    times = [now_s for *_, now_s in found]
    assert times == sorted(times)


def test_callback_is_called_for_all_replicas():
    plan = plan_of(orders("0F0 0B0"), (0,), data=2)
    _, found = told(plan)
    assert [device for moment, device, *_ in found if moment is CallMoment.START] == [0, 1, 0, 1, 0, 1]


def test_error_in_a_callback_ends_the_run():
    def fail(*_):
        raise ValueError("not here")

    with pytest.raises(ValueError, match="not here"):
        simulate(plan_of(orders("0F0 0B0"), (0,)), perform=fail)
