"""The ``grad`` whose value is not here: its shape may be read, its value may not."""

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.training.state import PARTS, SLICE, SharedGradient
from torch import nn


@pytest.fixture
def model():
    made = nn.Linear(3, 2)
    for name, parameter in made.named_parameters():
        parameter.grad = SharedGradient.of(parameter, name)
    return made


READS = {
    "norm": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "mul_": lambda model: model.weight.grad.mul_(2),
    "__getitem__": lambda model: model.weight.grad[0],
    "data": lambda model: model.weight.grad.data,
    "add": lambda model: torch.ones(2, 3) + model.weight.grad,
    "cat": lambda model: torch.cat([torch.ones(3), model.bias.grad]),
    "add_": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, foreach=False).step(),
    "tolist": lambda model: model.weight.grad.tolist(),
}


@pytest.mark.parametrize("name", READS)
def test_any_use_of_the_value_is_refused_with_the_name_and_what_to_do(model, name):
    with pytest.raises(RequestError, match=r"of the gradient of '(weight|bias)', which waits for an update") as raised:
        READS[name](model)
    assert str(raised.value).endswith(f"{PARTS}, or use Update(clip_norm=) to clip all of them")


def test_a_slice_says_where_its_gradient_can_be_read():
    weight = nn.Linear(3, 2).weight
    with pytest.raises(RequestError, match="read or change that of the parameter in the model"):
        SharedGradient.of(weight, "weight", SLICE).sum()
