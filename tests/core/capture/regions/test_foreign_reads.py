"""Reads of a module that stays Python: its own tensors and arguments, and those of others, which are refused."""

import pytest
import torch
from panpipe.core.capture.regions.foreign_reads import ForeignReads, foreign_tensors
from panpipe.core.errors import RequestError
from torch import nn


@pytest.fixture
def model():
    own = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    own[1].register_buffer("mean", torch.ones(2))
    return own


@pytest.fixture
def reads(model):
    return ForeignReads(model)


def test_own_parameters_arguments_and_what_it_computes_may_be_read(model, reads):
    with reads:
        x = torch.ones(1, 2) * 2
        with reads.within("model.1", model[1], [x]):
            y = model[1](x) + model[1].mean
            y.relu()


def test_parameter_of_another_module_is_refused(model, reads):
    with reads, reads.within("model.1", model[1], []):
        with pytest.raises(
            RequestError,
            match=r"test_foreign_reads.py:\d+: model.1 stays Python and reads '0.weight' here, which is no",
        ):
            model[0].weight.sum()
        assert model[0].weight.shape == (2, 2)  # metadata
        assert model[0].weight.size(0) == len(model[0].weight) == 2
        assert model[0].weight.is_contiguous()


def test_tensor_computed_elsewhere_in_the_step_is_refused(model, reads):
    with reads:
        x = torch.ones(1, 2) * 2
        with (
            reads.within("model.1", model[1], []),
            pytest.raises(RequestError, match=r"reads a tensor of shape \(1, 2\) here that the step computed outside"),
        ):
            x + 1
        x + 1  # the step itself may


def test_tensor_that_the_step_had_before_may_be_read(model, reads):
    outside = torch.ones(2)
    with reads, reads.within("model.1", model[1], []):
        outside + 1


def test_result_of_the_module_belongs_to_the_step_afterwards(model, reads):
    with reads:
        with reads.within("model.0", model[0], []):
            made = model[0].weight * 2
        with (
            reads.within("model.1", model[1], []),
            pytest.raises(RequestError, match="that the step computed outside of it"),
        ):
            made + 1


def test_copies_of_modules_have_replacements_of_foreign_tensors(model):
    found = foreign_tensors(model)
    assert set(found) == {id(t) for t in (*model.parameters(), *model.buffers())}
    weight, mean = found[id(model[0].weight)], found[id(model[1].mean)]
    assert (weight.shape, weight.is_meta, weight.size(1)) == ((2, 2), True, 2)
    assert (weight.is_contiguous(), weight.is_complex(), weight.nelement()) == (True, False, 4)
    with pytest.raises(RequestError, match=r"a module that stays Python reads '0.weight' here, which is not its own"):
        weight + 1
    with pytest.raises(RequestError, match=r"reads '1.mean' here"):
        torch.ones(2) * mean
    with pytest.raises(RequestError, match=r"reads '0.weight' here"):
        _ = weight.T
