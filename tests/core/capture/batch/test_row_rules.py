"""Placeholder results of operators that depend on values: numbers, selections, masks, and traces that never end."""

import pytest
import torch
from panpipe.core.capture.batch import row_rules
from panpipe.core.capture.batch.row_rules import RowWatch
from torch._subclasses.fake_tensor import FakeTensorMode


def watch(truth):
    return RowWatch(61, 61, truth, [], lambda number: False)


@pytest.mark.parametrize("truth", [True, False])
def test_numbers_are_one_and_bools_are_the_given_truth(truth):
    with watch(truth):
        assert torch.tensor(5).item() == 1
        assert torch.tensor(5.5).item() == 1.0
        assert bool(torch.tensor(not truth)) is truth
        assert torch.equal(torch.ones(1), torch.zeros(1)) is truth


@pytest.mark.parametrize(("truth", "rows"), [(True, 6), (False, 7)])
def test_selections_have_all_rows_or_some(truth, rows):
    given = FakeTensorMode().from_tensor(torch.zeros(2, 3))
    with watch(truth):
        assert given.nonzero().shape == (rows, 2)
        assert given.masked_select(given > 0).shape == (rows,)
        assert given[given > 0].shape == (rows,)


@pytest.mark.parametrize(("weights", "kind"), [
    (None, torch.int64), (torch.float32, torch.float32), (torch.float16, torch.float64), (torch.int64, torch.float64),
])  # fmt: skip
def test_counts_have_the_given_length_and_the_type_of_torch(weights, kind):
    mode = FakeTensorMode()
    given = mode.from_tensor(torch.zeros(5, dtype=torch.int64))
    each = None if weights is None else mode.from_tensor(torch.ones(5, dtype=weights))
    with watch(False):
        found = torch.bincount(given, each, minlength=9)
    real = torch.bincount(torch.zeros(5, dtype=torch.int64), each if weights is None else torch.ones(5, dtype=weights))
    assert (found.shape, found.dtype) == ((9,), kind)
    assert real.dtype == kind


def test_operators_on_known_values_run():
    with watch(False):
        found = torch.ones(2) + 1
    assert found.tolist() == [2, 2]


def test_trace_of_too_many_operators_ends(monkeypatch):
    monkeypatch.setattr(row_rules, "_MAX_OPERATORS", 3)
    given = torch.ones(1)
    with watch(True):
        for _ in range(3):
            given + 1
        with pytest.raises(RuntimeError, match="the step runs more than 3 operators"):
            given + 1


def test_trace_of_too_many_operators_ends_outside_of_queries_of_torch_itself(monkeypatch):
    """torch asks for the device of a fake tensor in C++, where an error ends the process."""
    monkeypatch.setattr(row_rules, "_MAX_OPERATORS", 3)
    with FakeTensorMode():
        given, weight = torch.ones(2, 3, 4, requires_grad=True), torch.ones(4, 4, requires_grad=True)

    def layers(given):
        for _ in range(4):
            given = torch.nn.functional.linear(given.transpose(0, 1), weight)

    with watch(True), pytest.raises(RuntimeError, match="more than 3 operators"):
        layers(given)
