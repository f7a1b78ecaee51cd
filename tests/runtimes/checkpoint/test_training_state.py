"""The state of training by name: what is read is what is written back, and what does not fit is refused."""

from functools import partial

import pytest
import torch
from attrs import evolve
from panpipe.core.errors import RequestError
from panpipe.runtimes.checkpoint.training_state import TrainingState, _by_parameter
from panpipe.runtimes.optimizer.stage_state import StageState
from torch import nn
from torch.amp.grad_scaler import GradScaler

ADAM = partial(torch.optim.Adam, lr=0.5)
STEP = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.1)


def state_of(seed=0, optimizer=ADAM, **options):
    """The state of a model whose two layers are two stages."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    scheduler = options.pop("scheduler", None)
    states = {
        index: StageState(
            {f"{index}.{name}": p for name, p in layer.named_parameters()}, dict(layer.named_buffers()), optimizer,
            scheduler=scheduler,
        )
        for index, layer in enumerate(model)
    }  # fmt: skip
    copied = []
    return TrainingState(model, states, lambda: copied.append(1), **options)


def trained(found):
    for state in found.states.values():
        assert state.scheduler is None or state.optimizer
        for parameter in state.parameters.values():
            parameter.grad = state.gradient_buffer(parameter).fill_(2.0)
        state.step()
    return found


def saved(found):
    """What is read, as a checkpoint has it: copies."""
    kept = found.read({"steps": 3})
    return {**kept, "model": {name: tensor.clone() for name, tensor in kept["model"].items()}}


def test_state_has_entries_by_the_names_of_parameters():
    found = trained(state_of()).read({"steps": 3})
    assert set(found) == {"model", "optimizer", "stepped", "progress"}
    assert set(found["model"]) == {
        "0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"
    }  # fmt: skip
    assert found["progress"] == {"steps": 3, "optimizer": "Adam"}
    assert found["stepped"] == dict.fromkeys(("0.weight", "0.bias", "1.weight", "1.bias"), True)
    assert found["optimizer"]["param_groups.0.weight.lr"] == 0.5
    assert found["optimizer"]["state.1.bias.step"] == 1
    without = state_of(optimizer=None).read({})
    assert (without["optimizer"], without["progress"]) == ({}, {})


def test_state_is_restored():
    first = trained(state_of(scheduler=STEP))
    kept = saved(first)
    other = state_of(seed=1, scheduler=STEP)
    for state in other.states.values():
        for parameter in state.parameters.values():
            parameter.grad = torch.ones_like(parameter)
    assert not torch.equal(other.model[0].weight, first.model[0].weight)
    other.write(kept)
    assert torch.equal(other.model[0].weight, first.model[0].weight)
    assert all(p.grad is None for p in other.model.parameters())
    assert other.states[0].optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    assert other.states[1].scheduler.last_epoch == 1
    trained(first)
    trained(other)
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), other.model.parameters(), strict=True))
    assert kept["scheduler"][0] == "StepLR"


def test_scaler_is_restored():
    first = state_of(scaler=GradScaler("cpu", init_scale=64.0))
    first.scaler.scale(torch.ones(1))
    kept = saved(first)
    other = state_of(scaler=GradScaler("cpu", init_scale=2.0))
    other.scaler.scale(torch.ones(1))
    other.write(kept)
    assert other.scaler.get_scale() == 64
    with pytest.raises(RequestError, match="the checkpoint has no state of a scaler, and the pipeline has one: leave"):
        state_of(scaler=GradScaler("cpu")).write(saved(state_of()))


class Average:
    def __init__(self, value, updates):
        self.updates, self.tensors = updates, {"0.bias": torch.full((2,), value)}


def test_averages_are_restored():
    kept = saved(state_of(averages=[Average(3.0, 7)]))
    other = state_of(averages=[Average(0.0, 0)])
    other.write(kept)
    (average,) = other.averages
    assert average.updates == 7
    assert average.tensors["0.bias"].tolist() == [3, 3]
    with pytest.raises(RequestError, match=r"the checkpoint has no average of '0\.bias' for average 0 of the pipeline"):
        state_of(averages=[Average(0.0, 0)]).write(saved(state_of()))


def changed(**changes):
    kept = saved(trained(state_of()))
    return {**kept, **{name: change(kept[name]) for name, change in changes.items()}}


def without(name):
    return lambda held: {key: value for key, value in held.items() if key != name}


REFUSED = {
    "a lacking tensor": (
        changed(model=without("0.bias")),
        "has no '0.bias', which the model has: it is",
    ),
    "a strange tensor": (
        changed(model=lambda held: held | {"2.x": torch.ones(1)}),
        "has '2.x', which the model does not",
    ),
    "a shape": (
        changed(model=lambda held: held | {"0.bias": torch.ones(3)}),
        r"'0.bias' has the shape \(3,\) in the checkpoint and \(2,\) in the model",
    ),
    "no optimizer": (
        changed(optimizer=lambda held: {}),
        "the checkpoint has no state of an optimizer, and the pipeline",
    ),
    "another optimizer": (
        changed(progress=lambda held: held | {"optimizer": "SGD"}),
        "the checkpoint is of the optimizer SGD and the pipeline has Adam",
    ),
    "another state": (
        changed(optimizer=without("state.0.bias.exp_avg")),
        "the checkpoint has exp_avg_sq, step of '0.bias' and the pipeline's optimizer keeps exp_avg, exp_avg_sq, step",
    ),
    "a frozen parameter": (
        changed(optimizer=lambda held: {key: value for key, value in held.items() if ".0.bias." not in key}),
        "the checkpoint's optimizer does not step '0.bias' and the pipeline's does: freeze it",
    ),
}


@pytest.mark.parametrize(("kept", "reason"), REFUSED.values(), ids=REFUSED)
def test_state_that_does_not_fit_is_refused_and_changes_nothing(kept, reason):
    found = state_of(seed=2)
    before = {name: tensor.clone() for name, tensor in found.model.state_dict().items()}
    with pytest.raises(RequestError, match=reason):
        found.write(kept)
    assert all(torch.equal(tensor, before[name]) for name, tensor in found.model.state_dict().items())


def test_scheduler_of_another_class_or_none_is_refused():
    kept = saved(trained(state_of(scheduler=STEP)))
    with pytest.raises(RequestError, match="the checkpoint is of the scheduler X and the pipeline has StepLR: train"):
        state_of(scheduler=STEP).write({**kept, "scheduler": ("X", kept["scheduler"][1])})
    del kept["scheduler"]
    with pytest.raises(RequestError, match="the checkpoint has no state of a scheduler"):
        state_of(scheduler=STEP).write(kept)


def test_replicas_of_buffers_are_copied_after_loading():
    copied = []
    found = evolve(state_of(), copy_buffers=lambda: copied.append(1))
    found.write(saved(trained(state_of())))
    assert copied == [1]


def test_keys_of_nested_names_belong_to_the_longest_parameter():
    listing = dict.fromkeys(
        [
            "optimizer.state.a.b.exp.x",
            "optimizer.state.a.step",
            "optimizer.param_groups.c.lr",
            "model.a",
            "optimizer.x.a",
        ]
    )
    assert _by_parameter(listing, {"a", "a.b", "c"}) == {"a.b": {"exp.x"}, "a": {"step"}, "c": set()}
