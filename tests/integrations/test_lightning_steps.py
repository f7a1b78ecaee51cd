"""Steps of a LightningModule as functions: losses, what they log, and what a captured step cannot read."""

import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.integrations.lightning import INDEX, TRAINER, detached, loss_of
from torch import nn


class Module(nn.Module):
    """What a step needs of a LightningModule."""

    def __init__(self, training_step):
        super().__init__()
        self.__dict__["_trainer"] = "the trainer"
        self.own_step = training_step

    def training_step(self, batch, index):
        return self.own_step(self, batch, index)

    def predict_step(self, batch, index):
        return batch + 1


def run(own_step, batch=None, shared=False):
    module, logged = Module(own_step), {}
    with detached(module, logged):
        result = loss_of("training_step", shared)(module, torch.ones(2) if batch is None else batch)
    return module, logged, result


def test_first_logged_value_is_the_loss_of_a_step_without_one():
    def step(module, batch, index):
        module.log("val_loss", batch.sum())

    assert run(step)[2][0].item() == 2
    with pytest.raises(RequestError, match="training_step returns no loss and logs nothing"):
        run(lambda module, batch, index: None)


def test_values_that_are_no_numbers_are_refused():
    with pytest.raises(RequestError, match=r"self.log\('name'\) has a str: log a tensor or a number"):
        run(lambda module, batch, index: module.log("name", "value"))


@pytest.mark.parametrize("use", [bool, int, lambda index: index % 2, lambda index: index == 0, lambda index: index + 1])
def test_number_of_a_batch_cannot_be_read(use):
    with pytest.raises(RequestError, match=r"batch_idx is read within a step.*put the number into the batch"):
        use(INDEX)
    with pytest.raises(RequestError, match=r"self.trainer is read within a step"):
        _ = TRAINER.global_step
