"""Attributes that a region's module assigns, and that code outside of it reads."""

from collections import defaultdict, deque

import pytest
import torch
from panpipe.core.capture.python.reachable.reach import reach
from panpipe.core.capture.regions.assigned_attributes import AttributesBefore, values_of_attributes
from panpipe.core.errors import RequestError
from torch import nn


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(2, 2)
        self.loss = self.internal = self.none = None
        self.count, self.log, self.by_name, self.last = 0, [], {"a": 1}, deque()
        self.uses = defaultdict(int)

    def forward(self, x):
        self.internal = x
        return self.gate(x)


def step(model, batch):
    found = model(batch)
    router = model[0]
    return found + router.loss, router.count, router.log, router.by_name, router.last, router.uses, router.gate.share


@pytest.fixture
def model():
    return nn.Sequential(Router())


@pytest.fixture
def before(model):
    return AttributesBefore("model.0", model[0], reach(model, step))


def test_assigned_tensors_that_are_read_outside_are_found(model, before):
    model[0].loss = torch.ones(1)
    model[0].gate.share = [torch.ones(1)]
    model[0].internal = torch.ones(1)
    model[0].unread = torch.ones(1)
    assert before.found() == (("", "loss"), ("gate", "share"))


def test_values_of_attributes_that_were_left(model):
    model[0].loss = torch.ones(1)
    loss, share = values_of_attributes(model[0], (("", "loss"), ("gate", "share")))
    assert loss is model[0].loss
    assert share is None


def set_count(router):
    router.count = 1


def append(router):
    router.log.append(1)


def set_key(router):
    router.by_name["a"] = 2


def push(router):
    router.last.append(3)


def count_use(router):
    router.uses["a"] += 1


@pytest.mark.parametrize(
    ("change", "name"),
    [(set_count, "count"), (append, "log"), (set_key, "by_name"), (push, "last"), (count_use, "uses")],
)
def test_other_changes_that_are_read_outside_are_refused_with_the_line(model, before, change, name):
    change(model[0])
    with pytest.raises(
        RequestError,
        match=rf"model.0 changes its attribute '{name}', which is read at .*test_assigned_attributes.py:\d+",
    ):
        before.found()


def test_equal_values_and_changes_that_nothing_outside_reads_are_left_alone(model, before):
    model[0].count = 0
    model[0].log = model[0].log
    model[0].internal = 5
    model[0].eval()
    assert before.found() == ()
