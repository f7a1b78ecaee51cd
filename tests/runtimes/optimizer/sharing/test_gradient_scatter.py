"""Gradients that replicas share, from backwards to the parts of the sums, over the transport of one process."""

import pytest
import torch
from panpipe.runtimes.optimizer.sharing.sharded_buckets import Sharing
from panpipe.runtimes.optimizer.sharing.shards import Shards
from panpipe.runtimes.optimizer.stage_state import StageState

from ....support.stages.sharded import SHAPES, adamw, alone, eager, gradient, model, on_each

ORDER = tuple(reversed(SHAPES))


def state_of(end, count, make=adamw, dtype=torch.float64, size=None):
    sharing = Sharing(lambda: end, end.device, count, frozenset({"tied"}), gradients=True, order=ORDER)
    state = StageState(model(dtype), {}, make, True, torch.device("cpu"), sharing=sharing)
    if size is not None:
        state.shards = Shards(state.trained, sharing, size)
    return state


def backward(state, end, step, names=ORDER, scattered=True):
    """One program that computes the gradients of a microbatch in this order."""
    parameters = [state.parameters[name] for name in names]
    sink = state.scatter.sink(parameters, scattered)
    sink.begin()
    for number, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
        sink.add(number, gradient(name, end.device, step, parameter.dtype))


def update(state, end):
    state.reduce_gradients(end).wait()
    assert end._addends._free == []  # what sums received is freed with the last
    state.step()
    state.gather(end).wait()


@pytest.mark.parametrize(("make", "dtype"), [(adamw, torch.float64), (eager, torch.float64), (adamw, torch.complex128)])
@pytest.mark.parametrize(("count", "size"), [(2, 1), (3, 100), (5, 10**6)])
def test_replicas_that_sum_each_microbatch_have_the_parameters_of_one_optimizer(count, size, make, dtype):
    def work(end):
        state = state_of(end, count, make, dtype, size)
        for step in range(2):
            state.clear_gradients()
            for microbatch in range(3):
                backward(state, end, 3 * step + microbatch)
                scattered = state.scatter.scatter()
                assert scattered.bytes == sum(bucket.nbytes for bucket in state.shards.buckets)
                scattered.wait()
            update(state, end)
        assert len(state.shards.slots.all) == min(2, len(state.shards.buckets))
        return {name: p.detach() for name, p in state.parameters.items()}

    wanted = model(dtype)
    optimizer = make(list(wanted.items()))
    for step in range(2):
        for name, parameter in wanted.items():
            parts = [gradient(name, r, 3 * step + m, dtype) for r in range(count) for m in range(3)]
            parameter.grad = sum(parts)
        optimizer.step()
    for found in on_each(count, work):
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name].detach(), rtol=0, atol=1e-12)


def sums(state):
    return {name: part.value.grad for name, part in state.shards.parts.items()}


def wanted_sum(state, name, pairs):
    part = state.shards.parts[name]
    total = sum(gradient(name, replica, step) for replica, step in pairs)
    if name == "conv":
        total = total.permute(0, 2, 3, 1)  # in the order of memory
    return total.flatten()[part.start : part.stop]


def check_sums(state, pairs):
    for name, value in sums(state).items():
        torch.testing.assert_close(value.flatten(), wanted_sum(state, name, pairs), rtol=0, atol=1e-12)


def test_first_of_two_halves_of_a_backward_occupies_no_slots():
    early, late = ("b", "w"), tuple(name for name in ORDER if name not in ("b", "w"))

    def work(end):
        state = state_of(end, 2, size=1)
        for microbatch in (0, 1):
            backward(state, end, microbatch, early, scattered=False)
        assert state.shards.slots.all == []
        for microbatch in (0, 1):
            backward(state, end, microbatch, late)
            state.scatter.scatter().wait()
        state.reduce_gradients(end).wait()
        check_sums(state, [(0, 0), (0, 1), (1, 0), (1, 1)])
        assert len(state.shards.slots.all) == 2
        return True

    assert all(on_each(2, work))


def test_replicas_that_compute_other_gradients_sum_the_same_buckets():
    def work(end):
        state = state_of(end, 2, size=1)
        names = ORDER[::-1] if end.device else ("conv", "tied")
        backward(state, end, 0, names)
        state.scatter.scatter().wait()
        state.scatter.scatter().wait()  # another microbatch, which neither replica has
        state.reduce_gradients(end).wait()
        both = ("conv", "tied")
        for name, value in sums(state).items():
            pairs = [(0, 0), (1, 0)] if name in both else [(1, 0)]
            torch.testing.assert_close(value.flatten(), wanted_sum(state, name, pairs), rtol=0, atol=1e-12)
        return True

    assert all(on_each(2, work))


def test_gradient_that_no_replica_has_is_none():
    def work(end):
        state = state_of(end, 2)
        backward(state, end, 0, [name for name in ORDER if name != "w"])
        state.scatter.scatter().wait()
        state.reduce_gradients(end).wait()
        return {name: value is not None for name, value in sums(state).items()}

    for found in on_each(2, work):
        assert all(there == (name != "w") for name, there in found.items())
    assert any("w" in found for found in on_each(2, work))


def test_sums_before_a_step_that_shall_change_nothing_are_set_again():
    def work(end):
        state = state_of(end, 2)
        backward(state, end, 0)
        state.scatter.scatter().wait()
        kept = state.scatter.kept()
        backward(state, end, 1)
        state.scatter.scatter().wait()
        state.reduce_gradients(end).wait()
        state.scatter.set(kept)
        backward(state, end, 2)
        state.scatter.scatter().wait()
        state.reduce_gradients(end).wait()
        check_sums(state, [(0, 0), (1, 0), (0, 2), (1, 2)])
        return True

    assert all(on_each(2, work))


def test_step_after_one_that_failed_begins_with_nothing():
    def work(end):
        state = state_of(end, 1, size=1)
        backward(state, end, 0, ORDER[:3])
        state.clear_gradients()
        backward(state, end, 1)
        state.scatter.scatter().wait()
        state.reduce_gradients(end).wait()
        check_sums(state, [(0, 1)])
        return len(state.shards.slots.all)

    assert on_each(1, work) == [2]


@pytest.mark.parametrize("by_section", [False, True])
def test_products_are_computed_in_the_slot(by_section):
    def work(end):
        state = state_of(end, 2)
        sink = state.scatter.sink([state.parameters["w"]], True)
        left, right = torch.ones(3, 2, dtype=torch.float64), torch.full((2, 5), 2.0, dtype=torch.float64)
        for _ in range(2):
            sink.begin()
            if by_section:  # of a compiled program
                [total] = sink.totals([0])
                total.addmm_(left, right)
                sink.added([0])
            else:
                sink.add_product(0, left, right)
            state.scatter.scatter().wait()
        state.reduce_gradients(end).wait()
        return [value for name, each in sums(state).items() if name == "w" for value in each.tolist()]

    assert [value for each in on_each(2, work) for value in each] == [16.0] * 15


def test_memory_of_gradients_is_a_part_and_two_slots():
    def work(end):
        state = state_of(end, 4, size=200)
        backward(state, end, 0)
        state.scatter.scatter().wait()
        largest = max(bucket.nbytes for bucket in state.shards.buckets)
        return sum(buffer.nbytes for buffer in state.gradient_buffers), largest

    whole = sum(p.nbytes for p in model().values())
    for held, largest in on_each(4, work):
        assert held <= whole / 4 + 2 * largest + 8 * 6  # each bucket's part is rounded up


def test_parameter_that_joins_gets_a_bucket_and_larger_slots():
    def work(end):
        state = state_of(end, 2, size=1)
        state.parameters["tied"].requires_grad_(False)
        state._trained.discard("tied")
        del state.shards
        rest = [name for name in ORDER if name != "tied"]
        backward(state, end, 0, rest)
        state.scatter.scatter().wait()
        update(state, end)
        state.parameters["tied"].requires_grad_(True)
        state.join("tied")
        state.clear_gradients()
        backward(state, end, 1)
        state.scatter.scatter().wait()
        state.reduce_gradients(end).wait()
        check_sums(state, [(0, 1), (1, 1)])
        return True

    assert all(on_each(2, work))


def test_stage_without_trained_parameters_sums_nothing_until_one_joins():
    def work(end):
        state = state_of(end, 2)
        for parameter in state.parameters.values():
            parameter.requires_grad_(False)
        state._trained.clear()
        backward(state, end, 0, ())
        assert state.scatter.scatter().bytes == 0
        update(state, end)
        state.parameters["w"].requires_grad_(True)
        state.join("w")
        state.clear_gradients()
        backward(state, end, 1, ("w",))
        state.scatter.scatter().wait()
        state.reduce_gradients(end).wait()
        check_sums(state, [(0, 1), (1, 1)])
        return state.gradient_buffers != []

    assert all(on_each(2, work))


def test_one_replica_of_one_is_one_process():
    wanted, _ = alone(1, adamw)

    def work(end):
        state = state_of(end, 1)
        for step in range(2):
            state.clear_gradients()
            backward(state, end, step)
            state.scatter.scatter().wait()
            update(state, end)
        return {name: p.detach() for name, p in state.parameters.items()}

    (found,) = on_each(1, work)
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name].detach(), rtol=0, atol=1e-12)
