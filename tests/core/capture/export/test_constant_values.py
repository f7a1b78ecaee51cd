"""The values of constants of a step that runs on fake tensors."""

import pytest
import torch
from panpipe.core.capture.export.constant_values import Constant, ConstantValues
from torch._subclasses.fake_tensor import FakeTensorMode

aten = torch.ops.aten


@pytest.fixture
def mode():
    return FakeTensorMode(allow_non_fake_inputs=True)


def run(values, mode, func, *args, **kwargs):
    """An operator on fake tensors, and on the values."""
    with mode:
        result = func(*args, **kwargs)
        values.compute(func, args, kwargs, result)
    return result


def test_values_follow_through_operators_of_constants(mode):
    values = ConstantValues()
    table = run(values, mode, aten.arange.default, 3, dtype=torch.float32)
    twice = run(values, mode, aten.mul.Tensor, table, 2.0)
    found = values.constant(twice)
    assert (found.shape, found.dtype, found.value.tolist()) == ((3,), torch.float32, [0.0, 2.0, 4.0])
    one, other = run(values, mode, aten.split.Tensor, twice, 2)
    assert values.constant(one).value.tolist() == [0.0, 2.0]
    assert values.constant(other).value.tolist() == [4.0]


def test_unknown_argument_makes_the_result_unknown(mode):
    values = ConstantValues()
    with mode:
        unknown = torch.ones(2)
    made = run(values, mode, aten.mul.Tensor, unknown, 2.0)
    assert values.constant(made).value is None
    assert values.constant(run(values, mode, aten.zeros_like.default, unknown)).value.tolist() == [0.0, 0.0]


def test_constant_written_with_something_unknown_is_unknown_from_then_on(mode):
    values = ConstantValues()
    table = run(values, mode, aten.zeros.default, [2])
    assert values.constant(table).value is not None
    with mode:
        unknown = torch.ones(2)
    run(values, mode, aten.add_.Tensor, table, unknown)
    assert values.constant(table).value is None


def test_the_users_own_tensor_is_not_written(mode):
    values, own = ConstantValues(), torch.zeros(2)
    values.compute(aten.add_.Tensor, (own, 1.0), {}, own)
    assert own.tolist() == [0.0, 0.0]
    assert values.constant(own).value.tolist() == [1.0, 1.0]


def test_large_tensor_is_not_computed(mode):
    values = ConstantValues()
    assert values.constant(run(values, mode, aten.ones.default, [(1 << 24) + 1])).value is None


def test_equal_values_are_kept_once_and_not_shared_with_what_is_written_later(mode):
    values = ConstantValues()
    tables = [run(values, mode, aten.ones.default, [4]) for _ in range(2)]
    first, second = map(values.constant, tables)
    assert first.value is second.value
    run(values, mode, aten.add_.Tensor, tables[0], 1.0)
    assert first.value.tolist() == [1.0] * 4
    assert values.constant(tables[0]).value.tolist() == [2.0] * 4


def constant(*numbers, dtype=torch.float32):
    value = torch.tensor(numbers, dtype=dtype)
    return Constant(tuple(value.shape), dtype, value)


def test_constants_are_equal_up_to_rounding():
    assert constant(1.0, float("nan")) == constant(1.0 + 5e-7, float("nan"))
    assert constant(1.0) != constant(1.00001)
    assert constant(1.0, dtype=torch.float64) != constant(1.0 + 1e-9, dtype=torch.float64)
    assert constant(1.0, dtype=torch.bfloat16) == constant(1.0078125, dtype=torch.bfloat16)
    assert constant(1, dtype=torch.int64) != constant(2, dtype=torch.int64)
    assert constant(1.0) != constant(1.0, dtype=torch.float64)
    assert constant(1.0) != constant(1.0, 1.0)
    assert constant(1.0) != 1.0
    assert hash(constant(1.0)) == hash(constant(2.0))


def test_unknown_values_equal_each_other_and_no_known_one():
    unknown = Constant((1,), torch.float32, None)
    assert unknown == Constant((1,), torch.float32, None)
    assert unknown != constant(1.0)
    assert unknown != Constant((2,), torch.float32, None)
