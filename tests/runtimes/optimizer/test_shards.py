"""Slices of optimizers that replicas share, over the transport of one process."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from panpipe.backends.memcpy import connect
from panpipe.core.errors import RequestError
from panpipe.runtimes.optimizer.shard_transfers import Gather, ShardedReduction
from panpipe.runtimes.optimizer.sharded_buckets import Sharing
from panpipe.runtimes.optimizer.shards import Shards
from panpipe.runtimes.optimizer.state import StageState
from torch import nn

SHAPES = {"w": (3, 5), "scalar": (), "b": (7,), "empty": (0, 4), "conv": (2, 3, 2, 2), "tied": (4, 3)}


def model(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    found = {n: nn.Parameter(torch.randn(shape, dtype=dtype, generator=generator)) for n, shape in SHAPES.items()}
    with torch.no_grad():
        found["conv"].data = found["conv"].data.to(memory_format=torch.channels_last)
    return found


def gradient(name, replica, step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1000 * step + 10 * replica + list(SHAPES).index(name))
    return torch.randn(SHAPES[name], dtype=dtype, generator=generator)


def on_each(count, work):
    ends = connect(count)
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, ends))


def states(end, count, make, dtype=torch.float64):
    sharing = Sharing(lambda: end, end.device, count, frozenset({"tied"}))
    return StageState(model(dtype), {}, make, True, torch.device("cpu"), sharing=sharing)


def adamw(named):
    return torch.optim.AdamW(named, lr=0.1, amsgrad=True)


def eager(named):
    return torch.optim.Adagrad([p for _, p in named], lr=0.1, initial_accumulator_value=0.5)


def train(state, end, steps=2):
    for step in range(steps):
        for name, parameter in state.parameters.items():
            buffer = state.gradient_buffer(parameter)
            assert buffer.stride() == parameter.stride()
            parameter.grad = buffer.copy_(gradient(name, end.device, step, parameter.dtype))
        state.reduce_gradients(end).wait()
        state.step()
        state.gather(end).wait()


def alone(count, make, dtype=torch.float64, steps=2):
    parameters = model(dtype)
    optimizer = make(list(parameters.items()))
    for step in range(steps):
        for name, parameter in parameters.items():
            parameter.grad = sum(gradient(name, replica, step, dtype) for replica in range(count))
        optimizer.step()
    return parameters, optimizer


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


@pytest.mark.parametrize("make", [adamw, eager])
def test_state_by_name_is_that_of_one_optimizer_and_is_loaded_into_other_slices(make):
    def work(end):
        state = states(end, 3, make)
        train(state, end)
        return state.named.read(), state.named.stepped

    parameters, optimizer = alone(3, make)
    whole = StageState(parameters, {}, make)
    whole.optimizer.load_state_dict(optimizer.state_dict())
    wanted = whole.named.read()
    (first, stepped), *others = on_each(3, work)
    for found in (first, *(read for read, _ in others)):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            if isinstance(value, torch.Tensor) and ".empty." not in name:
                torch.testing.assert_close(found[name], value.detach(), rtol=0, atol=1e-12)
    assert {name for name, done in stepped.items() if not done} == {"empty"}

    def again(end):
        state = states(end, 2, make)
        state.optimizer.load_state_dict(state.named.packed(first, stepped))
        return state.named.read()

    for found in on_each(2, again):
        for name, value in first.items():
            if isinstance(value, torch.Tensor) and ".empty." not in name:
                assert torch.equal(found[name], value), name


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
        return state.named.read()["state.b.step"].item(), state.named.read()["state.w.step"].item()

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
        most.append(len(reduction._flying))
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
