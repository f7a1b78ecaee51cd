"""Tensors that a run of a step leaves for later runs: which are constants, and which an earlier run computed."""

import pytest
import torch
from panpipe.core.capture.export.kept_tensors import KeptTensors, takes_no_values

aten = torch.ops.aten


@pytest.fixture
def parameter():
    return torch.ones(2)


@pytest.fixture
def kept(parameter):
    return KeptTensors([parameter])


def compute(kept, func, *given):
    """An operator of a run, recorded as capture records it."""
    result = func(*given)
    kept.note_written(func, (given, {}))
    if kept.depends(func, (given, {})):
        kept.note(func, (given, {}), result)
    return result


def test_result_of_the_batch_is_no_constant_and_belongs_to_its_run(kept):
    batch = torch.zeros(2)
    kept.begin([batch], [])
    made = compute(kept, aten.add.Tensor, batch, torch.ones(2))
    assert not kept.is_constant(made)
    assert not kept.read([made])  # in the run that computed it
    kept.begin([torch.zeros(2)], [])
    assert kept.read([made, torch.ones(2)])
    assert kept.read({"x": made[:1]})  # a view shares its memory
    assert not kept.read([batch])  # an input of every run


def test_result_of_constants_is_a_constant(kept, parameter):
    kept.begin([], [])
    table = compute(kept, aten.mul.Tensor, torch.ones(2), torch.ones(2))
    assert kept.is_constant(table)
    kept.begin([], [])
    assert not kept.read([table])
    assert not kept.is_constant(parameter)
    assert not kept.is_constant(compute(kept, aten.mul.Tensor, parameter, table))


def test_random_numbers_are_no_constants_and_shapes_alone_are(kept, parameter):
    kept.begin([], [])
    drawn = compute(kept, aten.bernoulli.default, torch.full((2,), 0.5))
    assert not kept.is_constant(drawn)
    assert kept.is_constant(compute(kept, aten.zeros_like.default, parameter))


def test_buffer_of_an_earlier_run_may_be_read(kept):
    batch, buffer = torch.zeros(2), torch.zeros(2)
    kept.begin([batch], [buffer])
    compute(kept, aten.add_.Tensor, buffer, batch)
    assert not kept.is_constant(buffer)
    kept.begin([batch], [buffer])
    assert not kept.read([buffer])
    kept.begin([batch], [])
    assert kept.read([buffer])


def test_input_that_a_run_writes_stays_an_input(kept, parameter):
    batch = torch.zeros(2)
    kept.begin([batch], [])
    compute(kept, aten.add_.Tensor, parameter, batch)
    kept.begin([batch], [])
    assert not kept.read([parameter])


def test_written_tensors_are_recorded_also_if_they_are_constants(kept):
    kept.begin([], [])
    table, other = torch.zeros(2), torch.zeros(2)
    compute(kept, aten.add_.Tensor, table, torch.ones(2))
    assert kept.is_written(table)
    assert kept.is_constant(table)
    assert not kept.is_written(other)


@pytest.mark.parametrize(
    ("func", "alone"),
    [
        (aten.new_empty.default, True), (aten.new_zeros.default, True), (aten.zeros_like.default, True),
        (aten.add.Tensor, False), (aten.clone.default, False), (len, False),
    ],
)  # fmt: skip
def test_operators_that_take_shapes_alone(func, alone):
    assert takes_no_values(func) is alone
