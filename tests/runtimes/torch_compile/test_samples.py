"""Which arguments of a graph hold the samples."""

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.torch_compile.samples import FIX, SampleSearch
from torch import fx


def found(function, names, *arguments, given=None, microbatches=2):
    return SampleSearch(fx.symbolic_trace(function)).find(arguments, names, given or {}, microbatches)


def test_arguments_with_rows_are_found_and_parameters_are_not_cut():
    def function(w, x, y):
        return ((x @ w - y) ** 2).mean(1)

    assert found(function, {1: "x", 2: "y"}, torch.ones(3, 3), torch.ones(8, 3), torch.ones(8, 3)) == {1, 2}


def test_argument_that_all_microbatches_share_is_given_or_found():
    def function(x, mask):
        return (x * mask).mean(1)

    arguments = torch.ones(8, 3), torch.ones(3)
    assert found(function, {0: "x", 1: "mask"}, *arguments) == {0}
    square = torch.ones(3, 3), torch.ones(3, 3)
    assert found(lambda x, w: (x @ w).mean(1), {0: "x", 1: "w"}, *square, given={"w": None}) == {0}
    assert found(lambda x, w: (x @ w).mean(1), {0: "x", 1: "w"}, *square, given={"x": 0, "w": None}) == {0}


def test_samples_along_another_dimension_are_refused():
    with pytest.raises(RequestError, match=r"argument 'x' has its samples along dimension 1, and a compiled model is"):
        found(lambda x: x.cumsum(0).mean(0), {0: "x"}, torch.ones(3, 8), given={"x": 1})


def test_doubt_is_refused_with_the_names_of_arguments():
    def function(x, y):
        return x[y.long()]

    with pytest.raises(RequestError) as refused:
        found(function, {0: "x", 1: "y"}, torch.ones(4, 6), torch.ones(4, dtype=torch.int32))
    text = str(refused.value)
    assert text.endswith(FIX)
    assert "batch['" not in text
    assert "batch_dims=" not in text  # an argument of panpipe.pipeline
    assert "index reads rows of the batch" in text
