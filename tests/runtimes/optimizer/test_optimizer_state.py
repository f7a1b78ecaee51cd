"""Optimizer state by names: what is read, what is packed again, and parameters that were never stepped."""

import functools

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.optimizer.optimizer_state import NamedState
from torch import nn

ADAM = functools.partial(torch.optim.AdamW, lr=0.1)


def stage(make=ADAM, step=("a", "b"), groups=False):
    """Two parameters with an optimizer that stepped some of them."""
    parameters = {name: nn.Parameter(torch.full((2,), float(i))) for i, name in enumerate("ab")}
    named = [{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(parameters.values())]
    optimizer = make(named if groups else list(parameters.values()))
    for name in step:
        parameters[name].grad = torch.ones(2)
    optimizer.step()
    return parameters, optimizer, NamedState(optimizer, make, parameters)


def test_state_is_read_by_names_with_the_optimizers_own_tensors():
    parameters, optimizer, state = stage()
    found = state.read()
    assert state.names == ["a", "b"]
    assert found["state.a.exp_avg"] is optimizer.state[parameters["a"]]["exp_avg"]
    assert (found["state.b.step"].item(), found["param_groups.a.lr"]) == (1.0, 0.1)
    assert not any("params" in key for key in found)
    assert state.kept["a"] == {"step", "exp_avg", "exp_avg_sq"}


def test_parameter_that_was_never_stepped_has_the_same_keys_with_zeros():
    _, _, state = stage(step=("a",))
    found = state.read()
    assert state.stepped == {"a": True, "b": False}
    assert {key for key in found if key.startswith("state.b.")} == {
        key.replace("state.a.", "state.b.") for key in found if key.startswith("state.a.")
    }
    assert found["state.b.exp_avg"].tolist() == [0.0, 0.0]
    assert state.kept["b"] == state.kept["a"]


def test_packed_state_is_what_the_optimizer_loads():
    _, _, source = stage()
    parameters, optimizer, target = stage(step=())
    found = source.read()
    optimizer.load_state_dict(target.packed(found, source.stepped))
    assert torch.equal(optimizer.state[parameters["b"]]["exp_avg"], found["state.b.exp_avg"])
    assert optimizer.state[parameters["b"]]["exp_avg"] is not found["state.b.exp_avg"]  # others' tensors are copied


def test_tensors_that_were_lent_are_used_as_they_are_and_unstepped_ones_get_no_state():
    _, _, state = stage()
    found = state.read()
    packed = state.packed(found, {"a": True, "b": False})
    assert packed["state"][0]["exp_avg"] is found["state.a.exp_avg"]
    assert set(packed["state"]) == {0}


def test_options_are_those_of_each_group():
    _, _, state = stage(groups=True)
    found = state.read()
    assert (found["param_groups.a.lr"], found["param_groups.b.lr"]) == (0.1, 0.2)
    found["param_groups.b.lr"] = 0.5
    assert [group["lr"] for group in state.packed(found, state.stepped)["param_groups"]] == [0.1, 0.5]
    _, _, joined = stage()
    with pytest.raises(RequestError, match=r"'a' has lr 0\.1 in the checkpoint and 'b' has 0\.5, and both are in one"):
        joined.packed(found, joined.stepped)


def test_state_that_belongs_to_no_parameter_is_refused():
    _, optimizer, state = stage()
    optimizer.state["global"] = {"count": 1}
    with pytest.raises(RequestError, match="AdamW keeps 'global', which belongs to no parameter"):
        state.read()
