"""An optimizer over the whole model, and the optimizers of stages that follow its groups."""

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.integrations.optimizers import ModelOptimizer
from torch import nn


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


@pytest.fixture
def given(model):
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters(), "lr": 0.2}]
    return torch.optim.AdamW(groups, betas=(0.5, 0.9))


def named(model, stage):
    return [(name, p) for name, p in model.named_parameters() if name.startswith(f"{stage}.")]


def test_groups_and_state_are_those_of_the_given_optimizer(model, given):
    found = ModelOptimizer(given, model)
    torch.optim.lr_scheduler.StepLR(given, 1, 0.5)
    given.param_groups[0]["lr"] = 0.7
    assert found.param_groups[0]["lr"] == 0.7
    assert found.state is given.state


def test_step_runs_its_closure_and_updates_nothing(model, given):
    before = model[0].weight.detach().clone()
    model[0].weight.grad = torch.ones(2, 2)
    found = ModelOptimizer(given, model)
    assert found.step() is None
    assert found.step(lambda: 5) == 5
    found.zero_grad()
    assert torch.equal(model[0].weight, before)
    assert model[0].weight.grad is not None


def test_optimizer_of_a_stage_has_the_class_groups_and_options(model, given):
    made = ModelOptimizer(given, model).stages(named(model, 1))
    assert type(made) is torch.optim.AdamW
    assert [group["lr"] for group in made.param_groups] == [0.1, 0.2]
    assert [group["betas"] for group in made.param_groups] == [(0.5, 0.9)] * 2
    assert [len(group["params"]) for group in made.param_groups] == [0, 2]
    assert made.param_groups[1]["params"][0] is model[1].weight


def test_stage_without_parameters_of_the_optimizer_has_none(model):
    found = ModelOptimizer(torch.optim.SGD(model[0].parameters(), lr=0.1), model)
    assert found.stages(named(model, 1)) is None
    assert found.stages(named(model, 0)) is not None
    trial = found.stages([("other", nn.Parameter(torch.ones(1)))])  # of a trial with other tensors
    assert len(trial.param_groups[0]["params"]) == 1


def test_state_of_a_checkpoint_is_copied(model, given):
    model[1].weight.grad = torch.ones(2, 2)
    given.step()
    made = ModelOptimizer(given, model).stages(named(model, 1))
    mine, theirs = made.state[model[1].weight]["exp_avg"], given.state[model[1].weight]["exp_avg"]
    assert torch.equal(mine, theirs)
    assert mine is not theirs


def test_options_lead_those_of_the_stages(model, given):
    found = ModelOptimizer(given, model)
    stages = {i: found.stages(named(model, i)) for i in range(2)}
    given.param_groups[1]["lr"] = 0.9
    found.stages.copy_options(list(stages.values()))
    assert [[g["lr"] for g in stage.param_groups] for stage in stages.values()] == [[0.1, 0.9]] * 2
    assert [len(g["params"]) for g in stages[0].param_groups] == [2, 0]


def test_loaded_options_are_those_of_both(model, given):
    found = ModelOptimizer(given, model)
    state = given.state_dict()
    state["param_groups"][0]["lr"] = 0.3
    found.load_state_dict(state)
    assert given.param_groups[0]["lr"] == found.param_groups[0]["lr"] == 0.3
    assert found.param_groups is given.param_groups


def test_parameter_of_another_model_is_refused(model):
    with pytest.raises(RequestError, match=r"SGD takes a parameter of shape \(3,\) that the model does not have"):
        ModelOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1), model)
