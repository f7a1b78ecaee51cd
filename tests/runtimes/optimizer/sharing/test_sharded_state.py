"""Optimizer state by name of a stage that replicas share: whole tensors on each, and slices of others again."""

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.optimizer.stage_state import StageState

from ....support.stages.sharded import SHAPES, adamw, alone, eager, on_each, states, train


@pytest.mark.parametrize("make", [adamw, eager])
def test_state_by_name_is_that_of_one_optimizer_and_is_loaded_into_other_slices(make):
    def work(end):
        state = states(end, 3, make)
        train(state, end)
        return state.named_state.read(), state.named_state.stepped

    parameters, optimizer = alone(3, make)
    whole = StageState(parameters, {}, make)
    whole.optimizer.load_state_dict(optimizer.state_dict())
    wanted = whole.named_state.read()
    (first, stepped), *others = on_each(3, work)
    for found in (first, *(read for read, _ in others)):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            if isinstance(value, torch.Tensor) and ".empty." not in name:
                torch.testing.assert_close(found[name], value.detach(), rtol=0, atol=1e-12)
    assert {name for name, done in stepped.items() if not done} == {"empty"}

    def again(end):
        state = states(end, 2, make)
        state.optimizer.load_state_dict(state.named_state.packed(first, stepped))
        return state.named_state.read()

    for found in on_each(2, again):
        for name, value in first.items():
            if isinstance(value, torch.Tensor) and ".empty." not in name:
                assert torch.equal(found[name], value), name


def test_state_before_the_first_step_has_the_keys_and_zeros():
    def work(end):
        named = states(end, 2, adamw).named_state
        return named.read(), named.stepped, named.kept

    for found, stepped, kept in on_each(2, work):
        assert stepped == dict.fromkeys(SHAPES, False)
        for name, shape in SHAPES.items():
            assert kept[name] == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
            assert found[f"state.{name}.exp_avg"].tolist() == torch.zeros(shape).tolist()
            assert found[f"param_groups.{name}.lr"] == 0.1


def test_whole_tensors_have_the_shape_of_the_parameter_in_its_order_of_elements():
    """`conv` is channels last: slices are of its memory, the result of its elements."""

    def work(end):
        state = states(end, 2, lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9))
        for parameter in state.parameters.values():
            ones = torch.arange(parameter.numel(), dtype=parameter.dtype).reshape(parameter.shape)
            parameter.grad = state.gradient_buffer(parameter).copy_(ones / 2)
        state.reduce_gradients(end).wait()
        state.step()
        return state.named_state.read()

    for found in on_each(2, work):
        momentum = found["state.conv.momentum_buffer"]
        assert momentum.is_contiguous()
        assert momentum.flatten().tolist() == list(range(momentum.numel()))


def test_parameter_that_was_not_stepped_gets_no_state():
    def work(end):
        source = states(end, 2, adamw)
        train(source, end)
        found, stepped = source.named_state.read(), source.named_state.stepped
        target = states(end, 2, adamw)
        packed = target.named_state.packed(found, {**stepped, "w": False})
        target.optimizer.load_state_dict(packed)
        return target.named_state.stepped

    for stepped in on_each(2, work):
        assert stepped == {name: name not in ("w", "empty") for name in SHAPES}


def test_options_that_differ_within_one_group_are_refused():
    def work(end):
        source = states(end, 2, adamw)
        train(source, end)
        found, stepped = source.named_state.read(), source.named_state.stepped
        with pytest.raises(RequestError, match=r"lr 0\.1 in the checkpoint and .* has 0\.5"):
            source.named_state.packed({**found, "param_groups.b.lr": 0.5}, stepped)

    on_each(2, work)
