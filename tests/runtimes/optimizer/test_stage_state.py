"""The state of a stage between steps: its gradients, its optimizer and scheduler, parameters that join later."""

from functools import partial

import pytest
import torch
from panpipe.backends.memcpy import connect
from panpipe.runtimes.optimizer.stage_state import StageState
from torch import nn

SGD = partial(torch.optim.SGD, lr=0.5)


def parameters(**values):
    given = values or {"w": [1.0, 2.0], "b": [3.0]}
    return {name: nn.Parameter(torch.tensor(value)) for name, value in given.items()}


def state(given=None, optimizer=SGD, **options):
    return StageState(parameters() if given is None else given, {}, optimizer, **options)


def with_gradients(found, value=1.0):
    for parameter in found.trained.values():
        parameter.grad = found.gradient_buffer(parameter).fill_(value)
    return found


def test_optimizer_steps_trained_parameters_and_is_created_once():
    given = parameters()
    given["b"].requires_grad_(False)
    found = with_gradients(state(given))
    assert found.optimizer is found.optimizer
    found.step()
    assert given["w"].tolist() == [0.5, 1.5]
    assert given["b"].tolist() == [3.0]
    assert list(found.trained) == ["w"]
    assert (found.trains("w"), found.trains("b")) == (True, False)


def test_stage_without_trained_parameters_or_without_training_has_no_optimizer():
    frozen = parameters()
    for parameter in frozen.values():
        parameter.requires_grad_(False)
    for found in (state(frozen), state(optimizer=None)):
        assert (found.optimizer, found.scheduler, found.named_state) == (None, None, None)
        found.step()
        assert not found.handles_found_inf


def test_scheduler_is_stepped_after_the_optimizer():
    found = with_gradients(state(scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.1)))
    assert found.scheduler is not None
    found.step()
    assert found.parameters["w"].tolist() == [0.5, 1.5]
    assert found.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    assert state().scheduler is None


def test_gradients_are_kept_in_one_buffer_for_each_parameter():
    found = state()
    w = found.parameters["w"]
    assert found.gradient_buffers == []
    buffer = found.gradient_buffer(w)
    assert found.gradient_buffer(w) is buffer
    assert buffer.shape == w.shape
    assert [each is buffer for each in found.gradient_buffers] == [True]
    w.grad = buffer
    found.clear_gradients()
    assert w.grad is None
    assert found.gradient_buffer(w) is buffer


def test_gradients_of_replicas_are_parts_of_buckets():
    found = state(replicated=True)
    w, b = (found.gradient_buffer(parameter) for parameter in found.parameters.values())
    (bucket,) = found.gradient_buffers
    assert w.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() == bucket.untyped_storage().data_ptr()


def test_gradient_of_a_split_parameter_is_no_part_of_the_bucket():
    found = state(replicated=True, split=frozenset({"w"}))
    w, b = (found.gradient_buffer(parameter) for parameter in found.parameters.values())
    assert w.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()
    assert sum(each.numel() for each in found.gradient_buffers) >= 3
    assert any(each is w for each in found.gradient_buffers)
    assert found.copies("w", 2) == 1


def test_gradients_are_summed_over_replicas():
    ends = connect(2)
    states = [with_gradients(state(replicated=True), value) for value in (1.0, 4.0)]
    started = [each.reduce_gradients(end) for each, end in zip(states, ends, strict=True)]
    for each in started:
        each.wait()
    assert [each.parameters["w"].grad.tolist() for each in states] == [[5, 5], [5, 5]]


def test_split_parameters_are_summed_over_replicas_with_the_same_part():
    whole, parts = connect(1), connect(2)
    states = [
        with_gradients(state(replicated=True, split=frozenset({"w"}), same_parts=end), value)
        for end, value in zip(parts, (1.0, 4.0), strict=True)
    ]
    assert states[0].copies("w", 2) == 2
    for each in [each.reduce_gradients(whole[0]) for each in states]:
        each.wait()
    assert [each.parameters["w"].grad.tolist() for each in states] == [[5, 5], [5, 5]]
    assert [each.parameters["b"].grad.tolist() for each in states] == [[1], [4]]


@pytest.mark.parametrize("divisor", [4, 4.0, torch.tensor(4.0)])
def test_gradients_are_divided(divisor):
    found = with_gradients(state(), 2.0)
    found.parameters["b"].grad = None
    found.divide_gradients(divisor)
    assert found.parameters["w"].grad.tolist() == [0.5, 0.5]
    found.divide_gradients(1)
    assert found.parameters["w"].grad.tolist() == [0.5, 0.5]


def test_gradients_are_multiplied():
    found = with_gradients(state(), 2.0)
    found.multiply_gradients(torch.tensor(3.0, dtype=torch.float64))
    assert found.parameters["w"].grad.tolist() == [6, 6]
    state().multiply_gradients(torch.tensor(3.0))  # without gradients


def test_parameter_that_was_frozen_joins_the_optimizer():
    given = parameters()
    given["b"].requires_grad_(False)
    found = with_gradients(state(given))
    found.step()
    given["b"].requires_grad_(True)
    found.join("b")
    assert found.trains("b")
    with_gradients(found).step()
    assert given["b"].tolist() == [2.5]
    assert list(found.named_state.names) == ["w", "b"]


def test_first_parameter_that_joins_makes_an_optimizer():
    given = parameters(w=[1.0])
    given["w"].requires_grad_(False)
    found = state(given)
    assert found.optimizer is None
    given["w"].requires_grad_(True)
    found.join("w")
    with_gradients(found).step()
    assert given["w"].tolist() == [0.5]


def test_tensor_that_was_added_to_the_optimizer_is_found():
    found = state()
    assert found.stray() is None  # not created yet
    other = nn.Parameter(torch.ones(1))
    assert found.optimizer is not None
    assert found.stray() is None
    found.optimizer.add_param_group({"params": [("other", other)]})
    assert found.stray() is other


def test_step_that_the_optimizer_skips_by_itself():
    class Skips(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None):
            assert self.grad_scale is None
            if not self.found_inf:
                with torch.no_grad():
                    for group in self.param_groups:
                        for parameter in group["params"]:
                            parameter.sub_(group["lr"] * parameter.grad)

    found = with_gradients(state(optimizer=partial(Skips, lr=0.5)))
    assert found.handles_found_inf
    found.step(torch.tensor(1.0))
    assert found.parameters["w"].tolist() == [1, 2]
    found.step(torch.tensor(0.0))
    assert found.parameters["w"].tolist() == [0.5, 1.5]
    assert not hasattr(found.optimizer, "found_inf")
    assert not state().handles_found_inf
    scheduled = state(optimizer=partial(Skips, lr=0.5), scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1))
    assert not scheduled.handles_found_inf  # the scheduler depends on it
