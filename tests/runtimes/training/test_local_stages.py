"""The stages of a process: values, optimizers, and changes of the model."""

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.engine.step_data import StepOptions
from panpipe.runtimes.optimizer.update import Ending
from torch import nn

from ...support.stages.arranged import Arranged


@pytest.fixture
def made():
    found = Arranged()
    yield found
    found.team.close()


@pytest.fixture
def stages(made):
    return made.parts.stages


def test_states_hold_the_users_own_parameters_and_buffers(made, stages):
    held = {name: p for state in stages.states.values() for name, p in state.parameters.items()}
    assert all(held[name] is p for name, p in made.model.named_parameters())
    buffers = {name for state in stages.states.values() for name in state.buffers}
    assert {"1.running_mean", "1.running_var"} <= buffers


def test_optimizers_are_made_when_values_are_loaded(made, stages):
    assert not stages.follow_model("now")  # nothing to follow yet
    stages.ensure_values()
    named = [state.optimizer for state in stages.states.values() if state.parameters]
    assert [type(each) for each in named] == [torch.optim.SGD] * len(named)
    before = stages._known
    stages.ensure_equal_values()
    assert stages._known is before  # loaded once


def test_replaced_parameter_is_refused_and_an_assigned_buffer_is_followed(made, stages):
    stages.ensure_values()
    held = made.model[1].running_mean
    made.model[1].running_mean = torch.full_like(held, 3.0)
    assert not stages.follow_model("between steps 1 and 2")
    assert held.tolist() == [3.0] * held.numel()
    made.model[0].weight = nn.Parameter(torch.ones_like(made.model[0].weight))
    with pytest.raises(RequestError, match=r"0\.weight"):
        stages.follow_model("between steps 1 and 2")


def train(made):
    runner = made.parts.runner
    runner.run(runner.batch(made.pieces()), 0, StepOptions(Ending.KEEP))


def test_threads_hold_all_parameters(made, stages):
    stages.ensure_values()
    assert not any(p.is_meta for p in made.model.parameters())


def test_model_on_meta_gets_values_once_they_are_needed():
    made = Arranged(on_meta=True)
    made.parts.stages.ensure_equal_values()
    assert not any(tensor.is_meta for tensor in made.model.state_dict().values())
    assert made.model[1].running_var.tolist() == [1.0] * 8
    assert made.model[0].weight is made.parts.stages._own.unallocated["0.weight"]
    train(made)
    assert made.model[0].weight.grad is not None
    made.team.close()
