"""The watch over uses of tensors' values during capture: late numbers, and what stops capture."""

import random

import pytest
import torch
from panpipe.core.capture.values.capture_errors import NeedsAutograd, NeedsValue, Refused
from panpipe.core.capture.values.late_numbers import LateNumber
from panpipe.core.capture.values.text_marks import filled_in
from panpipe.core.capture.values.value_watch import ValueWatch, is_unknown, reads_values
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode


@pytest.fixture
def fake():
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.ones(2, 3)


def test_item_of_a_captured_tensor_is_a_late_number(fake):
    with ValueWatch(sizes=True):
        number = fake.sum().item()
        count = fake.argmax().item()
    assert type(number) is type(count) is LateNumber
    assert (number.tensor.dtype, number.tensor.shape) == (torch.float64, ())
    assert count.tensor.dtype == torch.int64


def test_number_is_the_one_before_a_later_write(fake):
    total = fake.sum()
    with ValueWatch(sizes=True):
        number = total.item()
    assert number.tensor.untyped_storage()._cdata != total.untyped_storage()._cdata


def test_printed_tensors_and_numbers_are_recorded(fake):
    with ValueWatch(sizes=True) as watch:
        text = f"{fake.sum():.1f} and {fake.sum().item()}"
    assert len(watch.texts) == 2
    assert filled_in(text, [2.0, 6.0]) == "2.0 and 6.0"


@pytest.mark.parametrize(
    "read",
    [Tensor.tolist, Tensor.numpy, bool, int, float, lambda x: torch.equal(x, x), lambda x: 1 in x, Tensor.is_nonzero],
)
def test_other_reads_stop_capture(fake, read):
    with ValueWatch(sizes=True), pytest.raises(NeedsValue, match="needs the value of a tensor"):
        read(fake.sum().reshape(1))


@pytest.mark.parametrize("make", [lambda x: x.item(), lambda x: x.sum().to(torch.complex64).item()])
def test_items_of_several_elements_and_complex_ones_stop_capture(fake, make):
    with ValueWatch(sizes=True), pytest.raises(NeedsValue, match="item needs the value"):
        make(fake)


def test_value_of_a_tensor_outside_of_the_step_is_not_known_either():
    outside = torch.tensor(5.0)
    with ValueWatch(sizes=True):
        assert type(outside.item()) is LateNumber


def test_draws_of_python_are_refused(fake):
    with ValueWatch(sizes=True):
        random.random()
        with pytest.raises(Refused, match="draws random numbers from Python or numpy"):
            fake.sum()


def test_data_is_detached_and_not_assigned(fake):
    parameter = nn.Parameter(fake)
    with ValueWatch(sizes=True):
        assert not parameter.data.requires_grad
        with pytest.raises(Refused, match=r"the step assigns \.data of a parameter.* after pipe\.step"):
            parameter.data = fake


@pytest.mark.parametrize(
    ("use", "error", "said"),
    [
        (lambda x: torch.autograd.grad(x.sum(), x), NeedsAutograd, "grad differentiates in the middle of the step"),
        (lambda x: x.sum().backward(), NeedsAutograd, "backward differentiates"),
        (lambda x: x.to_sparse(), NeedsValue, "to_sparse creates a sparse tensor"),
        (
            lambda x: nn.utils.rnn.pack_padded_sequence(x[None], torch.tensor([2]), batch_first=True),
            NeedsValue,
            "pack_padded_sequence needs the values of its lengths",
        ),
    ],
)
def test_uses_that_cannot_be_captured_stop_with_the_reason(fake, use, error, said):
    with ValueWatch(sizes=True), pytest.raises(error, match=said):
        use(nn.Parameter(fake))


def test_step_has_started_when_an_operator_reads_a_parameter(fake):
    parameter = nn.Parameter(fake)
    with ValueWatch(sizes=True) as watch:
        fake.sum()
        assert not watch.started
        parameter.sum()
        assert watch.started


def test_kinds_of_functions_and_tensors():
    assert reads_values(Tensor.item)
    assert not reads_values(Tensor.sum)
    assert not is_unknown(torch.ones(1))
    assert not is_unknown(3)
    with FakeTensorMode():
        assert is_unknown(torch.ones(1))
