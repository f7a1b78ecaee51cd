"""The Python state of modules before a capture: trial runs have it, and afterwards the later one is back."""

import torch
from panpipe.core.capture.python.earlier_state import EarlierState
from torch import nn


class Noting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))
        self.calls, self.shapes = 0, [1]


def changed(model):
    model.calls = 5
    model.shapes.append(2)
    model.table = "set up"
    model.kept = torch.ones(2)


def test_trial_has_the_earlier_values_and_containers():
    model = Noting()
    earlier, shapes = EarlierState(model), model.shapes
    changed(model)
    with earlier.restored():
        assert (model.calls, model.shapes, hasattr(model, "table")) == (0, [1], False)
        assert model.shapes is shapes
        assert hasattr(model, "kept")  # tensors stay
        model.calls = 7
    assert (model.calls, model.shapes, model.table) == (5, [1, 2], "set up")


def test_later_state_is_back_after_an_error():
    model = Noting()
    earlier = EarlierState(model)
    changed(model)
    try:
        with earlier.restored():
            raise ValueError
    except ValueError:
        pass
    assert (model.calls, model.shapes) == (5, [1, 2])


def test_earlier_state_of_submodules_is_restored():
    model = nn.Sequential(Noting())
    earlier = EarlierState(model)
    changed(model[0])
    with earlier.restored():
        assert model[0].calls == 0


def test_nothing_is_restored_where_hooks_were_added():
    model = Noting()
    earlier = EarlierState(model)
    changed(model)
    model.register_forward_hook(print)
    with earlier.restored():
        assert model.calls == 5


def test_buffers_are_not_part_of_it():
    model = Noting()
    earlier, mean = EarlierState(model), torch.ones(1)
    model.mean = mean
    with earlier.restored():
        assert model.mean is mean
