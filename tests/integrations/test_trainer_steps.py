"""The loss of a microbatch as Trainer computes that of a batch: counted items, the weight, the outputs."""

import torch
from panpipe.integrations.trainer_steps import SHARE, BatchCount, Outputs, loss_step
from torch import nn
from transformers import Trainer


class Model(nn.Module):
    """Returns the inputs that it got, and a loss."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, **inputs):
        self.inputs = inputs
        return {"loss": torch.tensor(3.0), "logits": torch.ones(2, 1), "cache": 7}


def trainer(model, **changes):
    found = object.__new__(Trainer)
    given = {"model": model, "model_accepts_loss_kwargs": True, "label_smoother": None, "compute_loss_func": None}
    vars(found).update({**given, **changes})
    return found


def test_microbatch_without_items_is_divided_by_one():
    model, empty = Model(), torch.full((1, 2), -100)
    _, weight = loss_step(trainer(model), BatchCount(True, False), None)(model, {"labels": empty})
    assert weight == 0
    assert model.inputs["num_items_in_batch"] == 1


def test_weight_without_items_is_the_share_of_the_rows():
    model = Model()
    step = loss_step(trainer(model), BatchCount(False, False), None)
    batch = {"x": torch.ones(2), SHARE: torch.tensor([0.25, 0.5])}
    loss, weight = step(model, batch)
    assert (loss, weight) == (3, 0.75)
    assert SHARE not in model.inputs
    assert SHARE in batch
    assert step(model, {"x": torch.ones(2)}) == 3


def test_steps_and_outputs_run_under_autocast():
    class Casts(Model):
        def forward(self, x):
            return {"loss": self.layer(x).sum()}

    model = Casts()
    loss = loss_step(trainer(model), BatchCount(False, False), torch.bfloat16)(model, {"x": torch.ones(1, 1)})
    assert loss.dtype == torch.bfloat16
    (found,) = Outputs((), torch.bfloat16).of_microbatch(model, {"x": torch.ones(1, 1)})
    assert found.dtype == torch.bfloat16
