"""The random parameters with which optimizers are tried."""

import torch
from panpipe.runtimes.optimizer.trials import TrialParameters, spread, trial_shapes
from torch import nn


def test_numbers_of_a_parameter_do_not_depend_on_other_parameters():
    shapes = trial_shapes({name: nn.Parameter(torch.ones(8, 2)) for name in "ab"}, 3)
    assert shapes == dict.fromkeys("ab", ((3, 2), torch.float64))
    both, alone = TrialParameters(shapes), TrialParameters({"b": shapes["b"]})
    assert torch.equal(both.parameters["b"], alone.parameters["b"])
    assert torch.equal(both.draw("b"), alone.draw("b"))
    assert not torch.equal(both.parameters["a"], both.parameters["b"])


def test_complex_parameters_stay_complex():
    assert trial_shapes({"a": nn.Parameter(torch.ones(2, dtype=torch.complex64))}, 3)["a"][1] is torch.complex128


def test_names_are_chosen_at_equal_distances():
    assert spread("abcdefg", 3) == "adg"
    assert spread("ab", 8) == "ab"
    assert spread([], 8) == []
