"""Objects that keep values under names: those of a step, and containers that are compared and refilled."""

from collections import defaultdict, deque

import pytest
import torch
from panpipe.core.capture.python.holders import STEP, contents_of, has_entries, refill, step_holders
from torch import nn

LIMIT = 3


def counting():
    seen, empty = [], None
    del empty

    def step(model, batch):
        seen.append(LIMIT)
        return model(batch)

    return step


def test_step_has_the_variables_around_it_and_the_globals_that_it_names():
    step = counting()
    cells, names = (dict(holder) for _, holder in step_holders(step))
    assert [label for label, _ in step_holders(step)] == [STEP, STEP]
    assert cells == {"seen": []}
    assert names["LIMIT"] == 3
    assert "pytest" not in names  # the code does not name it
    (_, holder), _ = step_holders(step)
    holder["seen"] = [7]
    step(lambda batch: batch, 0)
    assert dict(holder) == {"seen": [7, 3]}


def test_object_of_a_step_is_a_holder_and_a_module_is_none():
    class Trainer:
        def __init__(self):
            self.rate = 0.1

        def step(self, model, batch):
            return model(batch)

    trainer = Trainer()
    label, holder = step_holders(trainer.step)[0]
    assert (label, dict(holder)) == ("the step's object", {"rate": 0.1})
    holder["rate"] = 0.2
    assert trainer.rate == 0.2
    del holder["rate"]
    assert not hasattr(trainer, "rate")
    assert len(holder) == 0
    assert all(label == STEP for label, _ in step_holders(nn.Linear(1, 1).forward))


@pytest.mark.parametrize(
    ("value", "other"),
    [
        ([1, 2], [1, 3]), (deque([1, 2]), deque([2, 1])), ({"a": 1}, {"a": 2}), ({1, 2}, {1, 3}),
        (defaultdict(int, a=1), defaultdict(int, b=1)), ([1], [1, 2]),
    ],
)  # fmt: skip
def test_container_gets_its_earlier_entries_back(value, other):
    before = contents_of({"held": value})["held"]
    assert before is not value
    assert has_entries(value, before)
    refill(value, other)
    assert not has_entries(value, before)
    refill(value, before)
    assert has_entries(value, before)
    assert type(before) is type(value)


def test_entries_are_compared_by_identity():
    tensor = torch.ones(2)
    assert has_entries([tensor], [tensor])
    assert not has_entries([tensor.clone()], [tensor])
    assert not has_entries({"a": tensor.clone()}, {"a": tensor})


def test_containers_of_torch_and_other_values_are_left_out():
    assert contents_of({"_parameters": {}, "_modules": {}, "a": [1], "b": 3, "c": (1,)}) == {"a": [1]}
