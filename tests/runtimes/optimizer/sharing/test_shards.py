"""Slices of optimizers that replicas share, over the transport of one process."""

import pytest
import torch
from panpipe.backends.memcpy import connect
from panpipe.core.errors import RequestError
from panpipe.runtimes.optimizer.sharing.shard_transfers import Gather, ShardedReduction
from panpipe.runtimes.optimizer.sharing.sharded_buckets import Sharing
from panpipe.runtimes.optimizer.sharing.shards import Shards
from torch import nn

from ....support.stages.sharded import adamw, alone, eager, gradient, model, on_each, states, train


@pytest.mark.parametrize("make", [adamw, eager])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_replicas_that_step_slices_have_the_parameters_of_one_optimizer(count, make):
    def work(end):
        state = states(end, count, make)
        train(state, end)
        return {name: p.detach() for name, p in state.parameters.items()}

    wanted, _ = alone(count, make)
    for found in on_each(count, work):
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name].detach(), rtol=0, atol=1e-12)
            assert value.stride() == wanted[name].stride()


def test_stages_cut_a_tied_weight_at_the_same_places():
    ends = connect(3)
    others = {"tied": model()["tied"], "more": nn.Parameter(torch.zeros(100, dtype=torch.float64))}
    for end in ends:
        sharing = Sharing(lambda end=end: end, end.device, 3, frozenset({"tied"}))
        first, second = (Shards(own, sharing).parts["tied"] for own in (model(), others))
        assert (first.start, first.stop) == (second.start, second.stop)


def test_each_replica_holds_its_part_of_the_state_alone():
    def work(end):
        state = states(end, 4, adamw)
        train(state, end)
        tensors = [v for one in state.optimizer.state.values() for v in one.values() if v.ndim]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    elements = sum(p.numel() for p in model().values())
    assert max(on_each(4, work)) <= 3 * 8 * (elements / 4 + 2)  # two buckets, each rounded up


def test_parameter_without_gradient_on_any_replica_is_not_stepped():
    def work(end):
        state = states(end, 2, adamw)
        before = {name: p.detach().clone() for name, p in state.parameters.items()}
        state.parameters["w"].grad = torch.ones(3, 5, dtype=torch.float64) if end.device else None
        state.reduce_gradients(end).wait()
        state.step()
        state.gather(end).wait()
        return {name for name, p in state.parameters.items() if not torch.equal(p, before[name])}

    assert on_each(2, work) == [{"w"}] * 2


def test_slices_follow_a_parameter_that_was_given_other_memory():
    def work(end):
        state = states(end, 2, lambda named: torch.optim.SGD(named, lr=1.0))
        assert state.optimizer is not None
        for parameter in state.parameters.values():
            parameter.data = torch.zeros_like(parameter)
        train(state, end, 1)
        return {name: p.detach() for name, p in state.parameters.items()}

    for found in on_each(2, work):
        for name, value in found.items():
            torch.testing.assert_close(value, -(gradient(name, 0, 0) + gradient(name, 1, 0)))


def test_gather_after_a_skipped_step_keeps_what_a_parameter_was_given():
    def work(end):
        state = states(end, 2, lambda named: torch.optim.SGD(named, lr=1.0))
        train(state, end, 1)
        for parameter in state.parameters.values():
            parameter.data = torch.full_like(parameter, 3.0)
        state.gather(end).wait()
        return [p.detach() for p in state.parameters.values()]

    for found in on_each(2, work):
        assert all(bool((value == 3.0).all()) for value in found)


def test_complex_parameters_are_shared():
    def work(end):
        state = states(end, 2, lambda named: torch.optim.Adam(named, lr=0.1), torch.complex128)
        train(state, end)
        return {name: p.detach() for name, p in state.parameters.items()}

    wanted, _ = alone(2, lambda named: torch.optim.Adam(named, lr=0.1), torch.complex128)
    for found in on_each(2, work):
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name].detach(), rtol=0, atol=1e-12)


def test_joined_parameter_leaves_the_slices_of_others_where_they_are():
    def work(end):
        state = states(end, 2, adamw)
        state.parameters["b"].requires_grad_(False)
        state._trained.discard("b")
        train_some(state, end, 0)
        before = {name: (part.start, part.stop) for name, part in state.shards.parts.items()}
        state.parameters["b"].requires_grad_(True)
        state.join("b")
        train_some(state, end, 1)
        assert {name: (p.start, p.stop) for name, p in state.shards.parts.items() if name != "b"} == before
        return state.named_state.read()["state.b.step"].item(), state.named_state.read()["state.w.step"].item()

    def train_some(state, end, step):
        for name, parameter in state.trained.items():
            parameter.grad = gradient(name, end.device, step)
        state.reduce_gradients(end).wait()
        state.step()
        state.gather(end).wait()

    assert on_each(2, work) == [(1.0, 2.0)] * 2


def test_parameters_that_overlap_in_memory_are_refused():
    (end,) = connect(1)
    with pytest.raises(RequestError, match=r"parameter 'p' has strides \(0, 1\) for shape \(2, 3\): .*dense"):
        Shards({"p": nn.Parameter(torch.ones(3).expand(2, 3))}, Sharing(lambda: end, 0, 2))


def test_reduction_of_many_buckets_has_few_in_flight():
    most = []

    def work(end):
        shards = Shards(model(), Sharing(lambda: end, end.device, 2), size=64)
        for parameter in shards.names:
            parameter.grad = torch.ones_like(parameter)
        reduction = ShardedReduction(shards, end)
        most.append(len(reduction._in_flight))
        reduction.wait()
        return all(bool((p.value.grad == 2).all()) for p in shards.parts.values()), len(shards.buckets)

    assert [done for done, _ in on_each(2, work)] == [True, True]
    assert most == [2, 2]


def test_gather_overwrites_no_gradient_that_is_visible():
    (end,) = connect(1)
    shards = Shards(model(), Sharing(lambda: end, 0, 1))
    for part in shards.parts.values():
        part.value.grad = part.gradient
    Gather(shards, end).wait()
    assert all(part.value.grad is None for part in shards.parts.values())


def test_options_that_differ_within_one_group_are_refused():
    def work(end):
        source = states(end, 2, adamw)
        train(source, end)
        found, stepped = source.named_state.read(), source.named_state.stepped
        with pytest.raises(RequestError, match=r"lr 0\.1 in the checkpoint and .* has 0\.5"):
            source.named_state.packed({**found, "param_groups.b.lr": 0.5}, stepped)

    on_each(2, work)
