"""Attributes and variables that a step assigns while it is captured: restored, kept, reported, or refused."""

import warnings

import pytest
import torch
from panpipe.core.capture.python.reachable.reach import reach
from panpipe.core.capture.python.restored_attributes import WritesTensor, attributes_restored
from panpipe.core.errors import RequestError
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.state, self.table, self.calls, self.ready, self.seen = torch.zeros(2), None, 0, False, []

    def forward(self, x):
        return self.run(x)


def step(model, batch):
    return model(batch)


def fake(*shape):
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.ones(*shape)


def run(forward, pending=None):
    """The model after a captured step with this forward."""
    model = type("Own", (Keeping,), {"run": forward})()
    model.kept = model.state
    with attributes_restored(model, step, reach(model, step), pending):
        step(model, fake(2))
    return model


def remembers(self, x):
    x = x + self.state
    self.state = x
    return x


def counts(self, x):
    self.calls += 1
    return x if self.calls > 3 else -x


def counts_alone(self, x):
    self.calls += 1
    return x


def sets_up(self, x):
    if self.table is None:
        self.table = x
    return x + self.table


def appends(self, x):
    self.seen.append(x)
    return x


def keeps_for_later(self, x):
    self.output = x
    return x


def test_tensor_that_is_passed_on_between_calls_is_refused_as_a_state():
    with pytest.raises(WritesTensor) as refused:
        run(remembers)
    assert refused.value.tensor.shape == (2,)


def test_count_that_is_read_is_refused_with_its_line():
    with pytest.raises(RequestError, match=r"test_restored_attributes.py:\d+: the model reads its attribute 'calls'"):
        run(counts)


def test_refusal_of_a_count_waits_where_it_may_only_be_set_up():
    pending = []
    model = run(counts, pending)
    assert model.calls == 0
    assert [each.number for each in pending] == ["calls"]


def test_count_that_nothing_reads_is_restored_with_a_warning():
    with pytest.warns(
        UserWarning, match="the model sets its attribute 'calls' in the step, but in a captured step it keeps"
    ):
        model = run(counts_alone)
    assert model.calls == 0


def test_table_that_is_set_up_is_removed_and_its_refusal_waits():
    with pytest.raises(RequestError, match="reads its attribute 'table' here and sets it in the step"):
        run(sets_up)
    pending = []
    model = run(sets_up, pending)
    assert model.table is None
    assert [each.number for each in pending] == [None]


def test_list_that_gets_captured_tensors_is_emptied_with_a_warning():
    with pytest.warns(
        UserWarning, match="'seen' in the step, but in a captured step it keeps the value that it has now, with 0 ent"
    ):
        model = run(appends)
    assert model.seen == []


def test_flag_is_restored_unless_a_hook_was_registered():
    with pytest.warns(UserWarning, match="'ready'"):
        assert run(reads_flag).ready is False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(registers).ready is True


def reads_flag(self, x):
    if not self.ready:
        self.ready = True
    return x


def registers(self, x):
    if not self.ready:
        self.linear.register_forward_hook(lambda *_: None)
        self.ready = True
    return x


def test_output_kept_for_later_is_removed_with_a_warning():
    with pytest.warns(
        UserWarning, match="sets its attribute 'output' in the step, but in a captured step it keeps .* none"
    ):
        model = run(keeps_for_later)
    assert not hasattr(model, "output")


def test_variable_of_the_step_is_restored():
    last = None

    def keeping(model, batch):
        nonlocal last
        last = batch
        return batch

    model = Keeping()
    with attributes_restored(model, keeping, reach(model, keeping)):
        keeping(model, fake(2))
    assert last is None


def test_attributes_are_restored_after_an_error_which_stays_the_same():
    def fails(self, x):
        self.state = x
        raise KeyError("the step's own")

    model = type("Own", (Keeping,), {"run": fails})()
    state = model.state
    with pytest.raises(KeyError, match="own"), attributes_restored(model, step, reach(model, step)):
        step(model, fake(2))
    assert model.state is state
    assert "__getattribute__" not in vars(nn.Module)
