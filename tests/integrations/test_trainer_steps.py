"""The loss of a microbatch as Trainer computes that of a batch: counted items, the weight, the outputs."""

import pytest
import torch
from panpipe.integrations.trainer_steps import SHARE, BatchCount, Outputs, loss_step
from torch import nn
from transformers import Trainer

LABELS = torch.tensor([[5, 1, -100], [6, -100, -100]])


class Model(nn.Module):
    """Returns the inputs that it got, and a loss."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, **inputs):
        self.inputs = inputs
        return {"loss": torch.tensor(3.0), "logits": torch.ones(2, 1), "cache": 7}


class Own(Trainer):
    def __init__(self):
        self.compute_loss_func = None

    def compute_loss(self, model, inputs, num_items_in_batch=None):
        return torch.tensor(1.0 if num_items_in_batch is None else float(num_items_in_batch))


def trainer(model, **changes):
    found = object.__new__(Trainer)
    given = {"model": model, "model_accepts_loss_kwargs": True, "label_smoother": None, "compute_loss_func": None}
    vars(found).update({**given, **changes})
    return found


def test_items_are_labels_that_are_not_ignored():
    assert BatchCount(True, False)({"labels": LABELS}) == 3
    assert BatchCount(True, True)({"labels": LABELS}) == 1  # without the first of each row
    assert BatchCount(True, True)({"labels": LABELS, "shift_labels": LABELS}) == 3


def test_items_are_counted_only_for_labels():
    assert BatchCount(True, False).counts({"labels": LABELS})
    assert BatchCount(True, False).counts({"shift_labels": LABELS})
    assert not BatchCount(True, False).counts({"labels": None})
    assert not BatchCount(False, False).counts({"labels": LABELS})


def test_weight_is_the_number_of_items():
    model = Model()
    loss, weight = loss_step(trainer(model), BatchCount(True, True), None)(model, {"labels": LABELS})
    assert (loss, weight) == (3, 1)
    assert model.inputs["num_items_in_batch"] == 1
    assert "labels" in model.inputs


def test_microbatch_without_items_is_divided_by_one():
    model, empty = Model(), torch.full((1, 2), -100)
    _, weight = loss_step(trainer(model), BatchCount(True, False), None)(model, {"labels": empty})
    assert weight == 0
    assert model.inputs["num_items_in_batch"] == 1


def test_model_that_takes_no_count_gets_none():
    model = Model()
    loss_step(trainer(model, model_accepts_loss_kwargs=False), BatchCount(True, True), None)(model, {"labels": LABELS})
    assert "num_items_in_batch" not in model.inputs


def test_weight_without_items_is_the_share_of_the_rows():
    model = Model()
    step = loss_step(trainer(model), BatchCount(False, False), None)
    batch = {"x": torch.ones(2), SHARE: torch.tensor([0.25, 0.5])}
    loss, weight = step(model, batch)
    assert (loss, weight) == (3, 0.75)
    assert SHARE not in model.inputs
    assert SHARE in batch
    assert step(model, {"x": torch.ones(2)}) == 3


def test_own_loss_gets_the_count():
    model = Model()
    assert loss_step(Own(), BatchCount(True, False), None)(model, {"labels": LABELS}) == (3, 3)
    assert loss_step(Own(), BatchCount(False, False), None)(model, {"labels": LABELS}) == 1


@pytest.mark.parametrize("name", ["compute_loss_func", "label_smoother"])
def test_function_of_the_outputs_gets_the_labels(name):
    model, seen = Model(), []

    def function(outputs, labels, **options):
        seen.append((outputs["cache"], labels is LABELS, options))
        return torch.tensor(9.0)

    loss, _ = loss_step(trainer(model, **{name: function}), BatchCount(True, False), None)(model, {"labels": LABELS})
    assert loss == 9
    assert seen == [(7, True, {"num_items_in_batch": 3})]
    assert "labels" not in model.inputs


def test_outputs_without_ignored_ones():
    model = Model()
    (logits,) = Outputs(("loss", "cache"), None).of_microbatch(model, {"x": 1})
    assert logits.shape == (2, 1)
    assert Outputs(("loss",), None).of_microbatch(lambda **inputs: (1, 2, inputs["x"]), {"x": 3}) == (2, 3)


def test_steps_and_outputs_run_under_autocast():
    class Casts(Model):
        def forward(self, x):
            return {"loss": self.layer(x).sum()}

    model = Casts()
    loss = loss_step(trainer(model), BatchCount(False, False), torch.bfloat16)(model, {"x": torch.ones(1, 1)})
    assert loss.dtype == torch.bfloat16
    (found,) = Outputs((), torch.bfloat16).of_microbatch(model, {"x": torch.ones(1, 1)})
    assert found.dtype == torch.bfloat16
