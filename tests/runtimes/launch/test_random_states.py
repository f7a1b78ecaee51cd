"""Building a pipeline leaves the generators of torch and numpy as they were."""

import random

import numpy
import panpipe
import pytest
import torch
from panpipe.runtimes.launch.random_states import random_states_kept

from ...support.models import CASES

F32 = torch.float32


def drawn():
    return random.random(), float(numpy.random.rand()), torch.rand(1).item()


def seed():
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)


def test_numbers_after_the_context_are_those_without_it_also_after_an_error():
    seed()
    expected = drawn()
    seed()
    with random_states_kept():
        drawn()
    assert drawn() == expected
    seed()

    def fails():
        with random_states_kept():
            drawn()
            raise KeyError("its own")

    with pytest.raises(KeyError, match="own"):
        fails()
    assert drawn() == expected


def test_pipeline_that_is_profiled_leaves_the_generators_as_they_were():
    case = CASES["batchnorm with a skip"]
    model, batch = case.model(F32), case.batch(8, F32)
    seed()
    expected = drawn()
    seed()
    with panpipe.pipeline(
        model, case.step, batch, optimizer=torch.optim.SGD, microbatches=4, schedule="1f1b", plan_cache=False,
        progress=False,
    ):  # fmt: skip
        assert drawn() == expected
