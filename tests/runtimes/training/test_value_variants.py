"""Variants of a step by the values that it reads: when it is captured again, and when not."""

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.training.value_variants import KEPT, Variants
from torch import nn


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.rate = nn.Linear(2, 2), 0.0

    def forward(self, x):
        return self.linear(x) * self.rate


def step(model, x):
    return model(x).mean()


class Steps:
    """The prepared steps of one variant; ``fails`` makes capturing fail."""

    fails = False

    def __init__(self, number):
        self.number, self.uses, self.dropped = number, 0, False

    def known(self, pieces):
        return self.uses > 0

    def of(self, pieces, agreement):
        if Steps.fails:
            raise RequestError("no such shape")
        self.uses += 1
        return self, None

    def forget(self):
        self.dropped = True


class Agreement:
    def __init__(self, known, change):
        self.known, self.change, self.refused = known, change, False

    def refuse_before_run(self):
        self.refused = True


@pytest.fixture
def model():
    Steps.fails = False
    return Scaled()


def variants_of(model):
    made, changes = [], []

    def make():
        made.append(Steps(len(made)))
        return object(), made[-1]

    return Variants(model, step, make, lambda: changes.append(True)), made, changes


def use(variants, model, rate):
    model.rate = rate
    return variants.of([torch.zeros(2)], Agreement)


def test_unchanged_values_use_the_same_programs_without_a_word(model):
    variants, made, changes = variants_of(model)
    for known in (False, True):
        steps, agreement, remark = use(variants, model, 0.0)
        assert (steps.number, agreement.known, agreement.change, remark) == (0, known, None, None)
    assert (len(made), changes) == (1, [])
    assert variants.prepared is made[0]


def test_changed_value_is_captured_once_and_ranks_compare_it_first(model):
    variants, made, changes = variants_of(model)
    use(variants, model, 0.0)
    steps, agreement, _ = use(variants, model, 0.5)
    assert (steps.number, agreement.known, agreement.refused, len(changes)) == (1, False, True, 1)
    assert "'model.rate', which was 0.0 and is 0.5" in str(agreement.change)
    steps, agreement, _ = use(variants, model, 0.0)
    assert (steps.number, len(made)) == (0, 2)  # known values capture nothing
    assert use(variants, model, 0.5)[0].number == 1


def test_variants_that_were_used_last_are_kept(model):
    variants, made, _ = variants_of(model)
    for number in range(KEPT + 1):
        use(variants, model, float(number))
    assert use(variants, model, 1.0)[0].number == 1
    assert use(variants, model, 0.0)[0].number == KEPT + 1  # it was evicted
    assert len(made) == KEPT + 2


def test_value_that_changes_is_reported_once(model, caplog):
    variants, _, _ = variants_of(model)
    for number in range(6):
        use(variants, model, float(number))
    assert len(caplog.records) == 1
    assert "the step reads 'model.rate', which was 0.0 and is 1.0: the step is captured again" in caplog.text


def test_failed_capture_names_the_change_and_is_tried_again(model):
    variants, made, _ = variants_of(model)
    use(variants, model, 0.0)
    Steps.fails = True
    with pytest.raises(RequestError, match=r"which was 0\.0 and is 0\.5, and the step captured again: no such shape"):
        use(variants, model, 0.5)
    with pytest.raises(RequestError, match=r"^no such shape$"):
        use(variants, model, 0.0)
    Steps.fails = False
    assert use(variants, model, 0.5)[0].uses == 1
    assert variants.prepared is made[-1]


def test_all_variants_are_forgotten(model):
    variants, made, _ = variants_of(model)
    for rate in (0.0, 0.5):
        use(variants, model, rate)
    variants.forget()
    assert [steps.dropped for steps in made] == [True, True]
