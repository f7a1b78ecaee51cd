"""Gradients of tied weights: the sum in stage order, in every copy."""

import threading
from types import SimpleNamespace

import pytest
import torch
from panpipe.backends.memcpy import connect
from panpipe.core.plan.plan import TiedWeight
from panpipe.runtimes.engine.tied import TiedReduction
from torch import nn


def copy_with(gradient, *, trained=True):
    copy = nn.Parameter(torch.zeros(2), requires_grad=trained)
    copy.grad = None if gradient is None else torch.tensor(gradient)
    return copy


def state(parameters, elsewhere=()):
    updated = {name: each for name, each in parameters.items() if name not in elsewhere}
    return SimpleNamespace(parameters=parameters, updated=updated)


W = TiedWeight("w", (0, 2), 8)


def reduce(placement, states, weights=(W,)):
    """Run the reduction on all devices; ``states`` are by stage."""
    plan = SimpleNamespace(tied=weights, placement=placement)
    ends = connect(max(placement) + 1)
    threads = []
    for end in ends:
        own = {stage: each for stage, each in states.items() if placement[stage] == end.device}
        threads.append(threading.Thread(target=TiedReduction(plan, own).reduce, args=(end,)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()


@pytest.mark.parametrize("placement", [(0, 0, 0), (0, 1, 1), (1, 0, 0)])
def test_every_copy_gets_the_sum_wherever_it_is(placement):
    first, last = copy_with([1.0, 2.0]), copy_with([10.0, 20.0])
    reduce(placement, {0: state({"w": first}), 1: state({}), 2: state({"w": last})})
    assert first.grad.tolist() == last.grad.tolist() == [11.0, 22.0]
    assert first.grad.data_ptr() != last.grad.data_ptr()


def test_copy_without_a_gradient_counts_as_zeros():
    first, last = copy_with(None), copy_with([1.0, 2.0])
    reduce((0, 1, 1), {0: state({"w": first}), 1: state({}), 2: state({"w": last})})
    assert first.grad.tolist() == last.grad.tolist() == [1.0, 2.0]


def test_sum_is_taken_in_stage_order():
    large, small = 1e8, 1.0
    copies = {stage: copy_with([value, value]) for stage, value in enumerate((large, small, -large))}
    states = {stage: state({"w": each}) for stage, each in copies.items()}
    reduce((0, 1, 0), states, (TiedWeight("w", (0, 1, 2), 8),))
    expected = (torch.tensor(large) + small - large).item()
    assert all(each.grad.tolist() == [expected] * 2 for each in copies.values())


def test_frozen_weight_and_one_of_another_replica_keep_their_gradients():
    first, last = copy_with([1.0, 2.0], trained=False), copy_with(None, trained=False)
    reduce((0, 1, 1), {0: state({"w": first}), 1: state({}), 2: state({"w": last})})
    assert (first.grad.tolist(), last.grad) == ([1.0, 2.0], None)
    ours, theirs = copy_with([1.0, 2.0]), copy_with([3.0, 4.0])
    reduce((0, 1, 1), {0: state({"w": ours}, ["w"]), 1: state({}), 2: state({"w": theirs}, ["w"])})
    assert (ours.grad.tolist(), theirs.grad.tolist()) == ([1.0, 2.0], [3.0, 4.0])
