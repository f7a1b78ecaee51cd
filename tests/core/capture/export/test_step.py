"""Capturing a step: what is found, and what is refused."""

import dataclasses
from pathlib import Path

import pytest
import torch
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.errors import RequestError
from torch import nn

from ....support.models import CASES

F32 = torch.float32


def line_of(mark: str) -> int:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(i for i, text in enumerate(lines, 1) if text.endswith("  " + mark))


def captured(name: str, rows: int = 2):
    case = CASES[name]
    return operators_of(capture_step(case.model(F32), case.step, case.batch(rows, F32)))


def test_model_on_meta_is_captured_like_one_with_data():
    case = CASES["tied gpt with dropout"]
    real = captured("tied gpt with dropout").graph
    with torch.device("meta"):
        model = case.model(F32)
    meta = operators_of(capture_step(model, case.step, case.batch(2, F32))).graph
    assert meta.hash == real.hash


def test_a_model_far_larger_than_this_machine_is_captured():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(65_536, 65_536) for _ in range(4)))
    operators = operators_of(capture_step(model, lambda m, x: m(x).mean(), torch.empty(1, 65_536, device="meta")))
    assert sum(n.parameter_bytes for n in operators.graph.nodes) > 64 * 2**30


def test_the_hash_follows_the_model_not_the_weights():
    assert captured("tied gpt with dropout").graph.hash == captured("tied gpt with dropout").graph.hash
    assert captured("tied gpt with dropout", 3).graph.hash != captured("tied gpt with dropout").graph.hash


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if y.sum() > 0:  # BRANCH
            y = y * 2
        return y


def test_data_dependent_control_flow_names_the_line():
    line = line_of("# BRANCH")
    step = capture_step(Branching(), lambda m, x: m(x).mean(), torch.ones(2, 4))
    assert [where.rpartition("/")[2] for where in step.regions.values()] == [f"test_step.py:{line} in forward"]


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda m, x: m(x), r"float32 tensor of shape \(2, 4\), which is not a scalar loss"),
        (lambda m, x: (m(x).mean(), m(x)), r"tensor of shape \(2, 4\) after the loss.*return other results in a dict"),
        (lambda m, x: 3.0, "a number and not a scalar loss"),
        (
            lambda m, x: float(m(x).mean().detach()),
            r"test_step.py:\d+: the step returns a number and not a scalar loss",
        ),
        (lambda m, x: m(x).mean().detach().numpy(), r"test_step.py:\d+: the step returns (an array|a number) and not"),
        (lambda m, x: torch.tensor(m(x).mean().item()), r"test_step.py:\d+: the loss that the step returns has no gr"),
        (lambda m, x: m(x).mean().backward(), r"test_step.py:\d+.*: the step calls backward\(\) here.* leave"),
        (lambda m, x: None, "not a scalar loss"),
        (lambda m, x: {"output": m(x).mean()}, r"test_step.py:\d+: the step returns dict and not a scalar loss"),
        (lambda m, x: m(x).argmax(), "int64 tensor of shape"),
        (lambda m, x: m(x).mean().item(), "not a scalar loss"),
        (lambda m, x: m(x).detach().mean(), r"test_step.py:\d+: the loss does not depend on any parameter"),
    ],
)
def test_a_step_without_a_scalar_loss_is_refused(step, said):
    with pytest.raises(RequestError, match=said):
        operators_of(capture_step(nn.Linear(4, 4), step, torch.ones(2, 4)))


def _fails_with_four_rows(model, x):
    assert len(x) != 4, "four rows"
    return model(x).mean()


def _fails_with_four_rows_of_values(model, x):
    assert torch.equal(torch.tensor(x.shape[:1]), torch.tensor([8])), "four rows"
    return model(x).mean()


@pytest.mark.parametrize("step", [_fails_with_four_rows, _fails_with_four_rows_of_values])
def test_an_assertion_that_fails_is_refused_with_the_shape_and_nothing_is_printed(step, capfd):
    said = r"test_step.py:\d+ in _fails.*the step raises AssertionError: four rows for a microbatch of 4×4: change"
    with pytest.raises(RequestError, match=said) as refusal:
        capture_step(nn.Linear(4, 4), step, torch.randn(4, 4))
    assert "\n" not in str(refusal.value)
    assert capfd.readouterr() == ("", "")


@dataclasses.dataclass
class Output:
    """What models of transformers return, and training steps of Lightning in a dict."""

    loss: torch.Tensor
    logits: torch.Tensor
    kl: float = 0.5
    cache: None = None


def in_dataclass(m, x):
    out = m(x)
    return Output(out.mean(), out)


def in_dict(m, x):
    out = m(x)
    if out.sum().item() > 1e9:  # the end of the step stays Python
        out = out * 2
    return {"loss": out.mean(), "logits": out, "kl": out.detach().mean()}


@pytest.mark.parametrize("step", [in_dataclass, in_dict])
def test_returned_object_gives_its_loss_and_its_scalars_as_metrics(step):
    outputs = capture_step(nn.Linear(4, 4), step, torch.ones(2, 4)).outputs
    assert outputs.loss
    assert outputs.weight is None
    assert set(outputs.metrics) == {"kl"}


def test_error_in_the_users_code_names_its_line():
    def step(model, batch):
        raise ValueError("no such thing")  # OWN

    line = line_of("# OWN")
    with pytest.raises(RequestError, match=rf"test_step\.py:{line} in step.*ValueError: no such thing"):
        capture_step(nn.Linear(4, 4), step, torch.ones(2, 4))
