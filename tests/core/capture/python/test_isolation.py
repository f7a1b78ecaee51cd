"""A step that is traced for where its samples are leaves nothing: no text, no random number, no attribute."""

import logging
import random
import sys
import threading
import warnings

import numpy
import pytest
import torch
from panpipe.core.capture.batch.find_batch_dims import find_batch_dims
from panpipe.core.capture.python.isolation import isolated
from panpipe.core.capture.python.reachable.reach import reach
from panpipe.core.capture.python.side_effects import outside_restored
from panpipe.core.errors import RequestError
from torch import nn

LOGGER = logging.getLogger("a training script")
COUNTS = {"steps": 0}
LOSSES = []


class Noting(nn.Module):
    """Leaves something of every kind in itself."""

    def __init__(self, plain):
        super().__init__()
        self.linear, self.plain = nn.Linear(8, 4), plain
        self.register_buffer("mean", torch.zeros(8))
        self.calls, self.mode, self.flag, self.seen, self.cache = 0, "new", False, [], {}

    def forward(self, x):
        assert not self.plain or type(x) is torch.Tensor
        self.calls += 1
        self.mode, self.flag = "old", True
        self.seen.append(len(x))
        self.cache["rows"] = x
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.late = x.shape
        return self.linear(x)


def step(model, x):
    print("rows", len(x))
    sys.stderr.write("rows\n")
    LOGGER.warning("rows %d", len(x))
    warnings.warn("rows", stacklevel=1)
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    COUNTS["steps"] += 1
    loss = model(x).mean()
    LOSSES.append(loss)
    return loss


def short_step(model, x):
    """What Dynamo captures, too."""
    print("rows", len(x))
    COUNTS["steps"] += 1
    return model(x).mean()


def drawn():
    return torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()


@pytest.mark.parametrize(("plain", "step"), [(False, step), (True, short_step)])
def test_tracing_changes_nothing_and_prints_nothing(plain, step, capfd, caplog):
    model = Noting(plain)
    attributes = {name: value for name, value in vars(model).items() if not name.startswith("_")}
    mean, batch = model.mean, torch.randn(6, 8)
    seeds = drawn()
    found = find_batch_dims(model, step, batch)
    assert found.by_name == {"batch": 0}
    assert drawn() == seeds
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
    assert {name: value for name, value in vars(model).items() if not name.startswith("_")} == attributes
    assert (model.calls, model.mode, model.flag, model.seen, model.cache) == (0, "new", False, [], {})
    assert model.mean is mean
    assert mean.eq(0).all()
    assert COUNTS == {"steps": 0}
    assert not LOSSES


class State:
    def __init__(self):
        self.count, self.text, self.all = 0, "before", []


@pytest.mark.parametrize(("divisor", "error"), [(1, RequestError), (0, ZeroDivisionError)])
def test_writes_of_a_step_are_undone_if_it_is_refused_or_fails(divisor, error):
    state = State()

    def write(model, x):
        if state.count > 3:
            return x
        state.count += 1
        state.text = "after"
        state.all.append(x)
        return x / divisor

    with pytest.raises(error), outside_restored(reach(nn.Identity(), write), []):
        write(None, 1)
    assert (state.count, state.text, state.all) == (0, "before", [])


class Hooking(nn.Module):
    """Hooks into its layers at the first call, as models of transformers do that return their hidden states."""

    def __init__(self):
        super().__init__()
        self.layers, self.hooked, self.seen = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), False, []

    def forward(self, x):
        if not self.hooked:
            for layer in self.layers:
                layer.register_forward_hook(lambda _module, _given, result: self.seen.append(result))
            self.hooked = True
        self.seen.clear()
        for layer in self.layers:
            x = layer(x)
        assert len(self.seen) == len(self.layers)
        return sum(self.seen)


def test_hooks_registered_by_a_traced_step_are_removed():
    model = Hooking()
    find_batch_dims(model, lambda model, x: model(x).mean(), torch.randn(4, 8), microbatches=2)
    assert [len(layer._forward_hooks) for layer in model.layers] == [0, 0]
    assert not model.hooked
    model(torch.randn(4, 8))


def test_other_threads_print_while_a_step_is_traced(capsys):
    """The thread that watches the ranks of a job prints why it ends the process, whatever the main thread does then."""
    model = nn.Linear(8, 4)

    def report():
        sys.stderr.write("panpipe: rank 2 stopped\n")
        sys.stderr.flush()

    with isolated(model, reach(model, step)):
        sys.stderr.write("rows\n")
        thread = threading.Thread(target=report)
        thread.start()
        thread.join()
    assert capsys.readouterr().err == "panpipe: rank 2 stopped\n"
