"""Values that the first run sets up: allowed if all runs compute the same, and otherwise refused."""

import pytest
import torch
from panpipe.core.capture.export.set_up_values import refuse_other_set_up
from panpipe.core.capture.export.trial_runs import TrialRuns, leaves_of
from panpipe.core.capture.python.pending_refusals import PendingRefusal
from panpipe.core.capture.python.reachable.reach import reach
from panpipe.core.errors import RequestError
from torch import nn

PENDING = RequestError("the pending refusal")


class Positions(nn.Module):
    """Keeps a table for the longest batch so far.

    Args:
        table: the size of a batch → its table.
        fits: the kept table, and the size of a batch → the part for this batch.
    """

    def __init__(self, table, fits):
        super().__init__()
        self.layer, self.kept, self.size, self.fixed = nn.Linear(1, 1), None, 0, 3
        self.table, self.fits = table, fits

    def forward(self, x):
        size = x.shape[0]
        if self.kept is None or self.size < size:
            self.kept, self.size = self.table(size), size
        return self.layer(x) + self.fits(self.kept, size)[:, None]


def step(model, batch):
    return model(batch).mean()


def refuse(model, sizes=(), pending=(), of=step, size=2):
    leaves, nesting = leaves_of(torch.ones(size, 1))
    runs = TrialRuns(model, of, nesting, torch.device("cpu"), True, reach(model, of))
    refuse_other_set_up(runs, leaves, [leaves_of(torch.ones(n, 1))[0] for n in sizes], list(pending))
    return runs


def arange(size):
    return torch.arange(float(size))


def cut(table, size):
    return table[:size]


def test_table_that_grows_and_is_cut_is_allowed():
    model = Positions(arange, cut)
    refuse(model, sizes=(5, 3), pending=[PendingRefusal(PENDING)])
    assert model.kept is None


def test_table_that_depends_on_the_longest_batch_is_refused():
    def scaled(size):
        return torch.arange(float(size)) / size

    refuse(Positions(scaled, cut))  # with this batch alone
    with pytest.raises(RequestError, match=r"after batches of other shapes \(the first run sets something up"):
        refuse(Positions(scaled, cut), sizes=(5,))
    with pytest.raises(RequestError, match="the pending refusal"):
        refuse(Positions(scaled, cut), sizes=(5,), pending=[PendingRefusal(PENDING)])


def test_other_batch_that_differs_after_a_longer_one_is_refused():
    def wrong_for_three(table, size):
        return table[:size] + (size == 3 and len(table) == 5)

    refuse(Positions(arange, wrong_for_three), sizes=(3, 4))
    with pytest.raises(RequestError, match="after batches of other shapes"):
        refuse(Positions(arange, wrong_for_three), sizes=(3, 5))


def test_only_the_last_other_batches_are_tried():
    def wrong_for_nine(table, size):
        return table[:size] + (len(table) == 9)

    refuse(Positions(arange, wrong_for_nine), sizes=(9, 3, 4, 5, 6))
    with pytest.raises(RequestError, match="other shapes"):
        refuse(Positions(arange, wrong_for_nine), sizes=(3, 4, 9, 6))


def test_step_that_differs_when_it_runs_again_is_refused():
    def counting(model, batch):
        first, model.size = model.size, 1
        return model.layer(batch).mean() * (1.0 if first else 2.0)

    with pytest.raises(RequestError, match=r"when it runs again \(the first run sets something up"):
        refuse(Positions(arange, cut), of=counting)


def test_number_that_changes_in_each_run_may_not_reach_the_loss():
    def counting(model, batch):
        model.size = model.size + 1
        return model.layer(batch).mean() * model.fixed

    def scaling(model, batch):
        model.size = model.size + 1
        return model.layer(batch).mean() * float(model.size)

    for name in ("fixed", "size"):
        refuse(Positions(arange, cut), of=counting, pending=[PendingRefusal(PENDING, name)])
    with pytest.raises(RequestError, match="the pending refusal"):
        refuse(Positions(arange, cut), of=counting, pending=[PendingRefusal(PENDING, "not found")])
    with pytest.raises(RequestError, match="the pending refusal"):
        refuse(Positions(arange, cut), of=scaling, pending=[PendingRefusal(PENDING, "size")])


def test_tensor_of_an_earlier_run_is_refused():
    def averaging(model, batch):
        out = model.layer(batch).mean()
        model.kept = out.detach() if model.kept is None else model.kept + out.detach()
        return out + model.kept

    with pytest.raises(RequestError, match="reads a tensor here that an earlier step computed and Python kept"):
        refuse(Positions(arange, cut), of=averaging)


def test_run_that_does_not_end_decides_nothing_unless_something_is_pending():
    def failing(model, batch):
        raise KeyError("x")

    assert not refuse(Positions(arange, cut), of=failing).ended
    with pytest.raises(RequestError, match="the pending refusal"):
        refuse(Positions(arange, cut), of=failing, pending=[PendingRefusal(PENDING)])
