"""Running the tail of a step again: earlier calls compute nothing, and what is read otherwise is refused."""

import pytest
import torch
from panpipe.core.capture.regions.observer import Observer
from panpipe.core.capture.regions.replay import Locator, Replay, copy_on_meta
from panpipe.core.capture.values.capture_errors import NeedsValue
from panpipe.core.errors import RequestError
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

NAMES = ["exp", "relu", "sum"]
BARE = torch.empty(2, device="meta")


def step(x):
    made = x.exp()
    return made.relu().sum()


def record_of(function, names, x=None):
    observer, x = Observer(lambda: 0), torch.zeros(2) if x is None else x
    with observer:
        result = function(x)
    return observer.tail(names, result)[0].record


def replayed(received, function=step, names=NAMES, x=None):
    replay = Replay(record_of(function, names), received, "train.py:3")
    with replay:
        return function(BARE if x is None else x)


def test_tail_gets_the_tensors_that_it_reads():
    assert replayed({(1, 0): torch.tensor([2.0, 3.0])}) == 5


def test_earlier_calls_compute_nothing():
    def function(x):
        made = x.exp()
        return made, made.relu().sum()

    made, total = replayed({(1, 0): torch.ones(2)}, function)
    assert made.is_meta
    assert total == 2


def test_tensor_that_the_example_did_not_read_is_refused():
    seen = []

    def function(x):
        made = x.exp()
        other = made.relu()
        return other.sum() + made.sum() if seen else other.sum()

    record = record_of(function, NAMES)
    seen.append(1)
    with (
        Replay(record, {(1, 0): torch.ones(2)}, "train.py:3"),
        pytest.raises(RequestError, match=r"train.py:3: after this line the step reads a tensor in sum that it"),
    ):
        function(BARE)


def test_metadata_of_such_a_tensor_may_be_read():
    seen = []

    def function(x):
        made = x.exp()
        total = made.relu().sum()
        return total * (made.size(0) + made.numel() + len(made)) if seen else total

    record = record_of(function, NAMES)
    seen.append(1)
    with Replay(record, {(1, 0): torch.ones(2)}, "l"):
        assert function(BARE) == 2 * 6


def test_layout_and_requires_grad_of_such_a_tensor_are_those_of_the_example():
    def function(x):
        made = x.t().exp()
        total = made.relu().sum()
        return total, made.stride(), made.is_contiguous(), made.requires_grad

    weight = torch.ones(2, 3, requires_grad=True)
    record = record_of(function, ["t", "exp", "relu", "sum"], weight)
    with Replay(record, {(2, 0): torch.ones(2)}, "train.py:3"):
        assert function(weight) == (2, (1, 3), False, True)


def test_another_call_before_the_tail_is_refused():
    def other(x):
        return x.sin().relu().sum()

    record = record_of(step, NAMES)
    with (
        Replay(record, {}, "train.py:3"),
        pytest.raises(RequestError, match=r"train\.py:3: the step calls sin here where it called exp for the example"),
    ):
        other(BARE)


def test_call_that_returns_its_argument_returns_the_present_one():
    def function(x):
        made = x.add_(1)
        return made, made.sum()

    given = torch.tensor([5.0, 6.0])
    made, total = replayed({}, function, ["add_", "sum"], given)
    assert made is given
    assert total == 11  # it was not written again


def test_calls_that_read_values_and_modes_run():
    def function(x):
        known = x.exp()
        with torch.no_grad():
            number = known.tolist()
        return known.relu().sum() * number[0]

    names = ["exp", "_set_grad_enabled", "tolist", "_set_grad_enabled", "relu", "sum"]
    record = record_of(function, names)
    assert len(record.reads) == 1
    with Replay(record, {(0, 0): torch.tensor([4.0, 0.0]), (4, 0): torch.ones(2)}, "l"):
        found = function(BARE)
    assert found == 8


def test_device_is_that_of_the_received_tensors():
    def function(x):
        made = x.exp()
        return torch.zeros(2, device=made.device) + made.sum()

    assert replayed({(0, 0): torch.ones(2)}, function, ["exp", "zeros"]).device.type == "cpu"


def test_locator_finds_the_places_and_the_names():
    locator, x = Locator([(0, 0), (2, 1)]), torch.tensor([1.0, 2.0])
    with locator:
        made = x.exp()
        made.relu()
        halves = made.chunk(2)
    assert locator.names == ["exp", "relu", "chunk"]
    assert locator.found[0, 0] is made
    assert locator.found[2, 1] is halves[1]
    assert len(locator.found) == 2


def test_locator_stops_at_the_call_that_needs_a_value():
    locator, mode = Locator(), FakeTensorMode()
    with mode:
        x = torch.ones(1)
        with locator:
            with pytest.raises(NeedsValue):
                x.exp().item()
            x.relu()
    assert locator.names == ["exp", "item"]


def test_other_errors_pass_the_locator():
    locator = Locator()
    with locator, pytest.raises(RuntimeError, match=r"shape|size"):
        torch.ones(2).view(3)
    with locator:
        torch.ones(2).exp()
    assert locator.names[-1] == "exp"


def test_skeleton_has_no_data_and_keeps_other_tensors():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].bias.requires_grad_(False)
    model[0].table = torch.ones(3)
    model[0].foreign = torch.ones(1)
    stand_in = torch.zeros(1)
    bare = copy_on_meta(model, {id(model[0].foreign): stand_in})
    assert all(t.is_meta for t in (*bare.parameters(), *bare.buffers()))
    assert [p.requires_grad for p in bare.parameters()] == [p.requires_grad for p in model.parameters()]
    assert bare[0].table is model[0].table
    assert bare[0].foreign is stand_in
    assert bare[0] is not model[0]
    assert not any(t.is_meta for t in model.parameters())
