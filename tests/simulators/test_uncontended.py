"""A step without contention, found without SimPy: exactly SimPy's, or not found."""

from unittest.mock import patch

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from panpipe.core.cluster.cluster import Cluster
from panpipe.core.cluster.routing import Link
from panpipe.core.plan.derive import forward_only
from panpipe.core.plan.lowering import lower
from panpipe.core.plan.queues import queues_of
from panpipe.core.plan.validation.validate import check_actions
from panpipe.simulators.run import simulate
from panpipe.simulators.uncontended import uncontended

from ..support.plans import plans, scheduled


def on_a_switch(plan, rate, latency_s):
    devices = plan.predicted.cluster.devices
    links = tuple(Link(each.name, "switch", rate, latency_s) for each in devices)
    return evolve(plan, prediction=evolve(plan.prediction, cluster=Cluster(devices, ("switch",), links)))


def in_simpy(plan, **options):
    with patch("panpipe.simulators.run.uncontended", return_value=None):
        return simulate(plan, **options)


def without_simpy(plan, *, eager=False, sharing=True):
    queues, known = queues_of(plan, lower(plan)), plan.predicted
    return uncontended(plan, queues, known.costs, known.cluster, eager=eager, sharing=sharing)


@settings(max_examples=150)
@given(plans(), st.sampled_from([None, 3.0, 300.0, 1e9]), st.booleans(), st.booleans(), st.booleans())
def test_what_is_found_without_simpy_is_exactly_its_run(plan, rate, eager, sharing, evaluation):
    plan = plan if rate is None else on_a_switch(plan, rate, 0.3)
    plan = evolve(forward_only(plan), prediction=plan.prediction) if evaluation else plan
    found = without_simpy(plan, eager=eager, sharing=sharing)
    if found is None:
        return
    run = in_simpy(plan, eager=eager, sharing=sharing)
    assert found[0] == run.operation_times
    assert found[1] == run.queue_times
    assert run.tasks == ()


@given(plans(), st.booleans())
def test_results_are_the_same_whether_the_plan_was_checked_before(plan, eager):
    checked, run = simulate(plan, eager=eager, checked=check_actions(plan)), in_simpy(plan, eager=eager)
    assert checked.operation_times == run.operation_times
    assert checked.peak_memory_bytes == run.peak_memory_bytes
    assert checked.trace == run.trace


@pytest.mark.parametrize(("rate", "free"), [(1e3, True), (3.0, False)], ids=["messages-apart", "messages-at-one-time"])
def test_a_switch_is_free_while_messages_cross_it_one_at_a_time(rate, free):
    # At 3 bytes/s a device receives an activation and a gradient at one time; at 1,000 none overlap.
    plan = on_a_switch(scheduled("1f1b", 4, 8), rate, 0.0)
    assert (without_simpy(plan) is not None) == free


def test_replicas_and_tied_weights_are_left_to_simpy():
    plan = scheduled("1f1b", 2, 4, data=2)
    queues = queues_of(plan, lower(plan)).replicated(2)
    known = plan.predicted
    assert uncontended(plan, queues, known.costs, known.cluster, eager=False, sharing=True) is None
