"""Results of steps: objects and dicts with a loss, and everything else."""

import collections
import dataclasses

import pytest
import torch
from panpipe.core.capture.values.containers import plain_result

LOSS, LOGITS, ONE = torch.tensor(1.0), torch.zeros(2, 3), torch.tensor([2.0])


@dataclasses.dataclass
class Output:
    loss: torch.Tensor | None
    logits: torch.Tensor = LOGITS
    accuracy: object = None


Named = collections.namedtuple("Named", ["loss", "accuracy"])


@pytest.mark.parametrize("result", [Output(LOSS), {"loss": LOSS}, {"loss": LOSS, "logits": LOGITS, "name": "x"}])
def test_object_with_a_loss_alone_is_that_loss(result):
    assert plain_result(result) is LOSS


@pytest.mark.parametrize("metric", [0.5, 3, True, ONE])
def test_scalars_next_to_a_loss_are_metrics(metric):
    for result in (Output(LOSS, LOGITS, metric), {"loss": LOSS, "accuracy": metric}, Named(LOSS, metric)):
        loss, metrics = plain_result(result)
        assert loss is LOSS
        assert list(metrics) == ["accuracy"]
        assert metrics["accuracy"] is metric


@pytest.mark.parametrize(
    "result", [LOSS, (LOSS, {"a": 1.0}), [LOSS], Output(None), {"losses": LOSS}, {}, None, Output], ids=str
)
def test_everything_else_is_returned_as_it_is(result):
    assert plain_result(result) is result
