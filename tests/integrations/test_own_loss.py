"""A Trainer's own loss: the weights of microbatches are found by trying; `test_transformers` has what is refused."""

from types import SimpleNamespace

import pytest
import torch
from panpipe.integrations.trainer_steps import BatchCount, step_of_trainer
from torch import nn
from transformers import Trainer

LABELS = torch.tensor([[1, 2, 3, 4, 5], [2, 3, 4, 5, 6], [3, 4, 5, 6, 7], [1, 3, 5, 7, 9]])
INPUTS = {"x": torch.tensor([[1.0], [2.0], [4.0], [9.0]]), "labels": LABELS}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.dropout = nn.Linear(1, 1), nn.Dropout(0.5)
        nn.init.ones_(self.layer.weight)

    def forward(self, x):
        return self.dropout(self.layer(x))


def losses(model, inputs):
    """One loss for each label; 0 where it is ignored."""
    return model(inputs["x"]) * inputs["labels"] * (inputs["labels"] != -100)


def counted(model, inputs):
    return (inputs["labels"] != -100).sum()


def of_items(model, inputs, items):
    return losses(model, inputs).sum() / items


def of_labels(model, inputs, items):
    return losses(model, inputs).sum() / counted(model, inputs)


def of_later_labels(model, inputs, items):
    later = {**inputs, "labels": inputs["labels"][:, 1:]}
    return losses(model, later).sum() / counted(model, later)


def of_rows(model, inputs, items):
    return model(inputs["x"]).mean()


def trainer(loss, accumulation=1):
    class Own(Trainer):
        def __init__(self):
            self.compute_loss_func, self.model = None, Model()
            self.args = SimpleNamespace(gradient_accumulation_steps=accumulation)

        def compute_loss(self, model, inputs, num_items_in_batch=None):
            return loss(model, inputs, num_items_in_batch)

    return Own()


def step_of(loss, shifts=False, example=INPUTS, **options):
    found = trainer(loss, **options)
    return found.model, step_of_trainer(found, BatchCount(True, shifts), None, example)


WEIGHTS = {of_items: 20, of_labels: 20, of_later_labels: 16, of_rows: None}


@pytest.mark.parametrize("loss", WEIGHTS, ids=lambda loss: loss.__name__)
def test_weight_that_is_right_is_found(loss):
    model, step = step_of(loss)
    result = step(model.eval(), INPUTS)
    weight = result[1].item() if isinstance(result, tuple) else None
    assert weight == WEIGHTS[loss]


@pytest.mark.parametrize("ignored", [[], [(slice(None), 0), (0, -1)]], ids=["no label", "first or last labels"])
def test_count_without_the_first_label_is_tried_from_either_side(ignored):
    labels = LABELS.clone()
    for place in ignored:
        labels[place] = -100
    model, step = step_of(of_labels, shifts=True, example={**INPUTS, "labels": labels})
    assert step(model.eval(), INPUTS)[1] == 20


def test_sum_divided_by_the_number_of_items_is_accumulated():
    model, step = step_of(of_items, accumulation=2)
    assert step(model.eval(), INPUTS)[1] == 20
