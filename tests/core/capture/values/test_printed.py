"""Steps that print, log and return numbers; and values that are known while a step is captured."""

import logging

import panpipe
import pytest
import torch
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family
from panpipe.core.search import even_plan
from torch import nn

# Steps that print, log and return numbers of tensors: text is shown once at capture, metrics have their values.


LOGGER = logging.getLogger("a training script")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def talking_step(model: nn.Module, batch: torch.Tensor):
    print("rows", len(batch))
    out = model(batch)
    loss = out.pow(2).mean()
    print(f"loss {loss.item():.4f}", f"{out.amax():>8.2f}", (out > 0).sum().item(), -loss.item() / 2)
    LOGGER.warning("%-5s loss %.3f, best %d", "now", loss.item(), out.argmax().item())
    LOGGER.warning("mean %s", round(out.mean().item(), 2))
    return loss, {"loss": loss.item(), "half": loss.item() / 2, "rows": 2, "positive": (out > 0).double().mean()}


def pipeline(step, batch):
    trained = model()
    operators = operators_of(capture_step(trained, step, batch[:2]))
    schedule = find_family("1f1b").build(ScheduleProblem(2, 2))
    return panpipe.pipeline(trained, step, batch, plan=even_plan(operators.graph, schedule, {}))


@pytest.mark.filterwarnings("default:.*so this is shown once")
def test_text_is_shown_once_when_the_step_is_captured_and_a_line_says_so(capsys, caplog, recwarn):
    batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    operators = operators_of(capture_step(model(), talking_step, batch[:2]))
    assert not operators.step.regions
    assert capsys.readouterr().out == "rows 2\nloss nan      nan nan nan\n"
    assert [record.getMessage() for record in caplog.records] == ["%-5s loss %.3f, best %d", "mean nan"]
    lines = [warning.lineno for warning in recwarn if "return metrics to see the values" in str(warning.message)]
    first = talking_step.__code__.co_firstlineno
    assert lines == [first + 1, first + 4, first + 5, first + 6]


def test_text_that_the_step_reads_is_that_of_one_process():
    def step(model, batch):
        loss = model(batch).pow(2).mean()
        return loss * float(f"{loss.item():.2f}"), {"rounded": float(f"{loss.item():.3f}")}

    batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    pipe = pipeline(step, batch)
    found = pipe.step(batch)
    expected = panpipe.reference_step(model(), step, batch, microbatches=2)
    torch.testing.assert_close(found, expected)
    assert pipe.metrics["rounded"] > 0


@pytest.mark.filterwarnings("ignore:.*so this is shown once")
def test_numbers_among_the_metrics_are_means():
    batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    pipe = pipeline(talking_step, batch)
    loss = pipe.step(batch).item()
    assert pipe.metrics["loss"] == pytest.approx(loss)
    assert pipe.metrics["half"] == pytest.approx(loss / 2)
    assert pipe.metrics["rows"] == 2
    assert 0 < pipe.metrics["positive"] < 1


def test_a_capture_with_symbolic_sizes_prints_nothing_again(capsys):
    def step(model, batch):
        print(batch.shape)
        return model(batch).mean()

    model = nn.Linear(4, 2)
    capture_step(model, step, torch.ones(3, 4), symbolic={0: (0,)})
    assert not capsys.readouterr().out
    with pytest.warns(UserWarning, match="the step prints"):
        capture_step(model, step, torch.ones(3, 4))
    assert capsys.readouterr().out == "torch.Size([3, 4])\n"


# Values that follow from numbers and sizes alone are known while a step is captured.


MASK = nn.Transformer.generate_square_subsequent_mask(6)
MASKS = {
    "made in the step": lambda module, x: nn.Transformer.generate_square_subsequent_mask(x.shape[1]),
    "a buffer": lambda module, x: module.mask[: x.shape[1], : x.shape[1]],
    "a global": lambda module, x: MASK,
}


class Encoder(nn.Module):
    """Reads whether its mask is a causal one."""

    def __init__(self, mask="made in the step") -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.mask_of = MASKS[mask]
        self.register_buffer("mask", MASK)

    def forward(self, x):
        return self.encoder(x, mask=self.mask_of(self, x))


def loss_of(model, x):
    return model(x).square().mean()


@pytest.mark.parametrize("symbolic", [None, {0: (1,)}])
@pytest.mark.parametrize("mask", MASKS)
def test_a_transformer_with_a_mask_is_many_operators(mask, symbolic):
    captured = capture_step(Encoder(mask), loss_of, torch.zeros(2, 6, 8), symbolic=symbolic)
    assert captured.regions == {}
    assert sum("linear" in node.name for node in captured.graph.nodes) >= 8
