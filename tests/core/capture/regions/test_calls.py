"""The numbered calls of a run of a step's Python: operators, modules that count as one, and metadata."""

import pytest
import torch
from panpipe.core.capture.regions.calls import Calls, Slot, numbered
from panpipe.core.tensor_metadata import name_of
from torch import nn


class Noted(Calls):
    """Records its calls, and runs them."""

    def __init__(self):
        super().__init__()
        self.names, self.metadata_read, self.held_in = [], [], []

    def call(self, number, func, run, given):
        assert number == len(self.names)
        self.names.append(name_of(func))
        self.held_in.append(self.held)
        return run()

    def metadata(self, func, args):
        self.metadata_read.append(func.__self__.__name__)
        return super().metadata(func, args)


class Twice(nn.Module):
    """A module whose forward uses its own attribute ``inner``."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x, factor=2):
        return self.inner(x).relu() * factor


@pytest.fixture
def calls():
    return Noted()


def test_operators_are_numbered_and_properties_with_tensors_are_operators(calls):
    x = torch.ones(2, 3)
    with calls:
        y = (x.T + 1).sum()
        assert x.shape == (2, 3)
        assert x.requires_grad is False
        _ = torch.ones(2, dtype=torch.complex64).real
    assert y == 12
    assert calls.names[:3] == ["T", "add", "sum"]
    assert calls.names[-1] == "real"
    assert calls.count == len(calls.names)
    assert calls.metadata_read == ["shape", "requires_grad"]


def test_module_counts_as_one_call_that_holds_its_tensors(calls):
    model = nn.Sequential(Twice(), nn.Linear(2, 2))
    x = torch.ones(1, 2)
    wanted = model(x)
    with numbered(model, ["0"], calls):
        found = model(x)
    assert torch.equal(found, wanted)
    assert calls.names == ["forward", "linear"]
    own = [*model[0].parameters(), *model[0].buffers()]
    assert [a is b for a, b in zip(calls.held_in[0], own, strict=True)] == [True] * 3
    assert calls.held_in[1] == ()
    assert "forward" not in vars(model[0])


def test_module_within_a_module_that_counts_as_one_is_not_counted(calls):
    model, x = nn.Sequential(Twice()), torch.ones(1, 2)
    with numbered(model, ["0", "0.inner"], calls):
        model(x)
    assert calls.names == ["forward"]


def test_forwards_are_put_back_after_an_error(calls):
    model = nn.Sequential(Twice(), Twice())

    def own(x):
        raise KeyError("the step's own")

    model[1].forward = own
    with pytest.raises(KeyError, match="own"), numbered(model, ["0", "1"], calls):
        model(torch.ones(1, 2))
    assert "forward" not in vars(model[0])
    assert model[1].forward is own
    assert calls.held == ()
    with calls:
        torch.ones(1).add(1)
    assert calls.names[-1] == "add"  # counts again


def test_stand_in_has_the_metadata_and_no_memory():
    given = torch.ones(3, 2, dtype=torch.float64, requires_grad=True).t()
    made = Slot.of(given).stand_in()
    assert (made.shape, made.stride(), made.dtype, made.requires_grad) == ((2, 3), (1, 2), torch.float64, True)
    assert made.is_meta
    assert Slot.of(torch.eye(2).to_sparse()).stand_in().shape == (2, 2)


def test_name_of_a_called_object_is_that_of_its_class():
    assert name_of(torch.relu) == "relu"
    assert name_of(nn.ReLU()) == "ReLU"
