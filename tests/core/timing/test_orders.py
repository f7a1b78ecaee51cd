"""The longest-path evaluation, and what stays on the devices of a plan that offloads, by hand."""

import attrs
import pytest
from attrs import evolve
from panpipe.core.actions import parse_action
from panpipe.core.cluster.cluster import Device, fully_connected
from panpipe.core.cluster.routing import Link
from panpipe.core.costs.costs import StageCosts, StageEdge
from panpipe.core.errors import RequestError
from panpipe.core.offload.not_offloaded import NO_HOST, NOT_CHOSEN, TOO_SHORT, NotOffloaded
from panpipe.core.timing.orders import evaluate
from panpipe.simulators.run import simulate

from ...support.plans import hosted, leaves, orders, plan_of

# The longest-path evaluation: times, memory, deadlocks, speed.


def order(*rows):
    return [[parse_action(word) for word in row.split()] for row in rows]


UNIT = StageCosts(1, 1, 1, saved_bytes=1)


def test_two_stages_by_hand():
    result = evaluate(order("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), (0, 1), [UNIT, UNIT], hop_s=0.5)
    assert result.starts == ((0, 1, 5, 8), (1.5, 2.5, 4.5, 5.5))
    assert result.ends == ((1, 2, 7, 10), (2.5, 4.5, 5.5, 7.5))
    assert (result.makespan, result.stage_span, result.busy) == (10, 10, (6, 6))
    assert result.bubble_ratio == pytest.approx(0.4)
    assert result.peak_memory == (2, 1)
    assert result.peak_position == (1, 0)


def test_full_backward_has_a_time_of_its_own():
    assert evaluate(order("0F0 0B0"), (0,), [StageCosts(1, 1, 1, backward_s=1.5)]).makespan == 2.5


def test_skip_edges_delay_forward_and_backward():
    edges = [StageEdge(0, 1, 1, 1), StageEdge(1, 2, 1, 1), StageEdge(0, 2, 100, 100)]
    result = evaluate(
        order("0F0 0B0", "1F0 1B0", "2F0 2B0"),
        (0, 1, 2),
        [UNIT] * 3,
        edges=edges,
        hop_s=lambda src, dst, size: size / 10 if abs(src - dst) == 2 else 0.0,
    )
    assert result.starts == ((0, 24), (1, 14), (11, 12))


def test_memory_of_split_backward():
    costs = [StageCosts(1, 1, 1, saved_bytes=10, freed_by_input_bytes=6, created_by_input_bytes=2)]
    held = evaluate(order("0F0 0I0 0F1 0I1 0W0 0W1"), (0,), costs)
    assert held.peak_memory == (16,)
    assert held.peak_position == (2,)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1"), "the order deadlocks: 0B0 waits for 1B0 (reads its output), 1B0 waits "
         "for 1F1 (runs after it), 1F1 waits for 0F1 (reads its output), 0F1 waits for 0B0 (runs after it)"),
        (("0B0 0F0", "1F0 1B0"), "the order deadlocks: 0B0 waits for 0F0 (reads its output), 0F0 waits for 0B0"),
        (("0F0 0W0 0I0", "1F0 1B0"), "the order deadlocks: 0W0 waits for 0I0"),
        (("0F0", "1F1"), "1F1 on device 1 reads 0F1, which no device computes: add it to device 0"),
        (("0F0 1F0",), "1F0 is in the order of device 0, and its stage is on device 1"),
        (("7F0",), "7F0 is in the order of device 0, and its stage does not exist"),
        (("0F0 0SEND_F0",), "0SEND_F0 is in a compute order"),
        (("0STEP",), "0STEP is in a compute order"),
    ],
)  # fmt: skip
def test_orders_that_cannot_run_are_refused(rows, message):
    with pytest.raises(RequestError) as caught:
        evaluate(order(*rows), (0, 1), [UNIT] * 2)
    assert message in str(caught.value)


def test_recompute_runs_while_the_gradient_is_awaited():
    cost = StageCosts(2.0, 1.0, 1.0, saved_bytes=10, input_bytes=4)
    wait = evaluate(order("0F0 0B0", "1F0 1B0"), (0, 1), [cost, cost], recompute=[0])
    assert wait.starts == ((0.0, 6.0), (2.0, 4.0))  # the second forward runs from 2 to 4, and the gradient comes at 6
    assert wait.peak_memory == (10, 10)
    late = evaluate(order("0F0 0F1 0B0 0B1"), (0,), [attrs.evolve(cost, recompute_s=1.5)], recompute=[0])
    assert late.starts == ((0.0, 2.0, 5.5, 9.0),)
    assert late.busy == (11.0,)
    assert late.peak_memory == (14,)  # at the first B: 10 for it, and the inputs of the other microbatch
    assert late.peak_position == (2,)


# What stays on the devices of a plan that offloads, with the reasons, by hand.


COST = StageCosts(1.0, 1.0, 1.0, saved_bytes=100, input_bytes=1)
LINK = Link("device0", "alone", 100.0, 0.0)
HOST = hosted(fully_connected(1, 10**6, 1.0, 0.0), 100.0, latency_s=0.25)


def kept(row, placement, *offload, recompute=(), cost=COST):
    plan = plan_of(
        orders(row), placement, costs=[cost] * len(placement), cluster=HOST, offload=offload, recompute=recompute
    )
    return simulate(plan).kept


def test_microbatch_that_comes_back_at_once_cannot_leave():
    found = kept("0F0 0F1 0F2 0B2 0B1 0B0", (0,), leaves(0, 100, "0: 0F1 0B1"))
    assert found == (
        NotOffloaded(0, 1, 100, TOO_SHORT, (0.0, 0.0), 2.5),
        NotOffloaded(0, 1, 100, NOT_CHOSEN),
    )


def test_tensors_of_a_device_without_a_host_stay():
    cluster = evolve(HOST, devices=(*HOST.devices, Device("alone", 10**6)), links=(*HOST.links, LINK))
    rows = orders("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")
    plan = plan_of(rows, (0, 1), costs=[COST] * 2, cluster=cluster, offload=(leaves(0, 100, "1: 0F2 0F2"),))
    assert NotOffloaded(1, 3, 100, NO_HOST) in simulate(plan).kept
