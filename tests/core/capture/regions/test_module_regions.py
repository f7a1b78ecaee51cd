"""Modules that stay Python: what a run shows of their calls, and their calls as regions of a capture."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from panpipe.core.capture.graph.autograd_functions import holding
from panpipe.core.capture.graph.randomness import KeyedRandom, random_key
from panpipe.core.capture.python.changes import Changes
from panpipe.core.capture.python.guards import Guards
from panpipe.core.capture.regions import module_regions
from panpipe.core.capture.regions.module_regions import CapturedOtherwise, ModuleRegions
from panpipe.core.errors import RequestError
from torch import nn

X = torch.tensor([[1.0, 2.0]])


class Gate(nn.Module):
    """Needs a value; ``run`` gets the module and its arguments."""

    def __init__(self, run=None):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(()))
        self.run = run or (lambda gate, x: gate.layer(x) * 2 if x.sum() > 0 else gate.layer(x))

    def forward(self, *args, **kwargs):
        return self.run(self, *args, **kwargs)


class Plain(nn.Module):
    def __init__(self, run=None):
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(2, 2), Gate(run), nn.Linear(2, 2)

    def forward(self, x):
        return self.last(self.gate(self.first(x)))


def step(model, batch):
    return model(batch).sum()


def regions_of(model):
    found = ModuleRegions(model)
    found.keep("gate", "train.py:3")
    return found


def observe(regions, model, times=1, x=X):
    regions.forget_calls()
    changes = Changes(Guards(model, step), lambda value: True)
    with KeyedRandom(random_key(0, 0, 0)) as random, regions.watched(random, changes):
        for _ in range(times):
            found = model(x)
    return found


def called(regions, model, x=X, tried=False):
    with holding(), regions.called(model, tried):
        return model(x)


def test_all_modules_of_a_class_are_kept_and_inner_ones_are_part_of_theirs():
    model = nn.Sequential(nn.Linear(2, 2), Gate(), nn.Sequential(Gate()), nn.ReLU())
    regions = ModuleRegions(model)
    regions.keep("1", "a:1")
    assert regions.lines == {"1": "a:1", "2.0": "a:1"}
    regions.keep("0", "a:2")  # 1.layer is inside of a region
    assert regions.lines == {"1": "a:1", "2.0": "a:1", "0": "a:2"}
    regions.keep("2", "a:3")
    assert regions.lines == {"1": "a:1", "0": "a:2", "2": "a:3"}


def test_call_as_a_region_has_the_results_and_gradients_of_the_module():
    torch.manual_seed(0)
    model = Plain()
    wanted = model(X)
    wanted.sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    regions = regions_of(model)
    assert torch.equal(observe(regions, model), wanted)
    with holding(), regions.called(model, False):
        found = model(X)
        found.sum().backward()
    assert torch.equal(found, wanted)
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())
    assert "forward" not in vars(model.gate)


def test_forward_that_was_replaced_before_is_put_back():
    model = Plain()
    own = model.gate.forward = lambda x: x * 3
    regions = regions_of(model)
    observe(regions, model)
    assert model.gate.forward is own


def test_written_buffer_is_written_by_the_region():
    def counting(gate, x):
        gate.count.add_(1)
        return gate.layer(x)

    model = Plain(counting)
    regions = regions_of(model)
    observe(regions, model)
    assert model.gate.count == 1
    called(regions, model)
    assert model.gate.count == 2


def test_call_more_often_than_observed_is_refused_unless_it_is_tried():
    model = Plain()
    regions = regions_of(model)
    regions.forget_calls()
    with pytest.raises(RequestError, match=r"train.py:3: module 'gate' was called 0 times for the example"):
        called(regions, model)
    found = called(regions, model, tried=True)
    assert torch.equal(found, model(X))


REFUSED = {
    "writes its arguments": (lambda gate, x: gate.layer(x.mul_(2)), "writes its arguments in place"),
    "assigns data": (
        lambda gate, x: (setattr(gate.layer.weight, "data", torch.ones(2, 2)), gate.layer(x))[1],
        r"assigns \.data of its parameter 'layer.weight'",
    ),
}


@pytest.mark.parametrize(("run", "reason"), REFUSED.values(), ids=REFUSED)
def test_observed_calls_that_are_refused(run, reason):
    model = Plain(run)
    with pytest.raises(RequestError, match=f"train.py:3: module 'gate' {reason}"), torch.no_grad():
        observe(regions_of(model), model)


def test_constant_that_depends_on_values_is_refused():
    class Numbers(Plain):
        def forward(self, x):
            out, number = self.gate(self.first(x))
            return out * number

    model = Numbers(lambda gate, x: (gate.layer(x), 1 if x.sum() > 0 else 2))
    with torch.no_grad():
        model.first.weight.copy_(torch.eye(2))
        model.first.bias.zero_()
    regions = regions_of(model)
    observe(regions, model)
    with pytest.raises(RequestError, match="module 'gate' returns 2 and not 1, which it returned for the example"):
        called(regions, model, x=-X)


def test_module_that_fails_with_its_captured_arguments():
    model = Plain(lambda gate, x: gate.layer(x).view(1, 2))
    regions = regions_of(model)
    observe(regions, model)
    with pytest.raises(CapturedOtherwise, match="module 'gate' stays Python and fails with its arguments while"):
        called(regions, model, x=torch.ones(3, 2))


def test_attribute_that_the_module_leaves_is_set_again():
    class Leaves(Plain):
        def forward(self, x):
            return self.last(self.gate(self.first(x))) + self.gate.share

    def leaving(gate, x):
        gate.share = x.sum()
        return gate.layer(x)

    model = Leaves(leaving)
    model.gate.share = None
    regions = regions_of(model)
    wanted = observe(regions, model)
    model.gate.share = None
    assert torch.equal(called(regions, model), wanted)
    assert model.gate.share is not None


def test_draws_of_a_call_are_those_of_the_region():
    model = Plain(lambda gate, x: gate.layer(x) * torch.rand(1, 2))
    regions = regions_of(model)
    observe(regions, model)
    (call,) = regions._calls["gate"]
    assert call.draws == 1
    assert call.given == ((1, 2),)


def test_two_threads_run_a_module_at_the_same_time(monkeypatch):
    meeting, both, first_ended = [], threading.Barrier(2), threading.Event()

    def run(gate, x):
        if meeting and both.wait(60) == 1:  # the second one to arrive computes after the end of the first one
            assert first_ended.wait(60)
        return gate.layer(x) * 2

    def in_two_threads(region, reads, written):
        def ran(_):
            try:
                return region.run(reads)
            finally:
                first_ended.set()

        with ThreadPoolExecutor(2) as threads:
            found, again = threads.map(ran, range(2))
        assert torch.equal(found[0], again[0])
        return found

    model = Plain(run)
    regions = regions_of(model)
    expected = observe(regions, model)
    meeting.append(True)
    monkeypatch.setattr(module_regions, "call_region", in_two_threads)
    assert torch.equal(called(regions, model), expected)
