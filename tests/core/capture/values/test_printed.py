"""Steps that print, log and return numbers: the same is said as one process says, once for each microbatch."""

import contextlib
import io
import logging

import panpipe
import pytest
import torch
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.capture.values.late_numbers import LateNumber
from panpipe.core.capture.values.printed import output_recorded
from panpipe.core.errors import RequestError
from panpipe.core.schedules.problem import ScheduleProblem
from panpipe.core.schedules.registry import find_family
from panpipe.core.search import even_plan
from torch import nn

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


def test_printed_and_logged_text_equals_one_process(capsys, caplog):
    batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    pipe = pipeline(talking_step, batch)
    capsys.readouterr()
    caplog.clear()
    pipe.step(batch)
    said, logged = capsys.readouterr().out, [record.getMessage() for record in caplog.records]
    caplog.clear()
    panpipe.reference_step(model(), talking_step, batch, microbatches=2)
    assert said == capsys.readouterr().out
    assert logged == [record.getMessage() for record in caplog.records]
    assert said.count("rows 2") == 2


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def showing_step(model: nn.Module, batch: torch.Tensor):
    """Prints tensors of one element, in every way in which torch shows them."""
    out = model(batch)
    loss = out.pow(2).mean()
    print(loss, [loss.detach()], {"row": out[:1, :1]}, out[0, 1:2], loss.sum(0, keepdim=True))
    print(loss.double(), loss.bfloat16() * 1e6, (out > 9).any(), out.argmax(), out.argmax().int(), loss / 0)
    print(f"{loss} {loss:.3f} {out[0, :1]} {model.scale} {model.scale * 2}", model.scale, repr(model.scale))
    print(Doubled.apply(loss), torch.nn.functional.binary_cross_entropy_with_logits(out.double(), batch.double()))
    LOGGER.warning("%s of %s", loss, out.sum())
    with torch.no_grad():
        print(out.mean())
    return loss * model.scale


def test_printed_scalar_tensors_equal_one_process(capsys, caplog):
    batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))

    def scaled() -> nn.Module:
        made = model()
        made.scale = nn.Parameter(torch.ones(()))
        return made

    trained = scaled()
    operators = operators_of(capture_step(trained, showing_step, batch[:2]))
    assert not operators.step.regions
    schedule = find_family("1f1b").build(ScheduleProblem(2, 2))
    pipe = panpipe.pipeline(trained, showing_step, batch, plan=even_plan(operators.graph, schedule, {}))
    capsys.readouterr()
    caplog.clear()
    pipe.step(batch)
    said, logged = capsys.readouterr().out, [record.getMessage() for record in caplog.records]
    caplog.clear()
    panpipe.reference_step(scaled(), showing_step, batch, microbatches=2)
    assert said == capsys.readouterr().out
    assert logged == [record.getMessage() for record in caplog.records]
    assert "grad_fn=<DoubledBackward>" in said


FORMATS = ["%d", "%i", "%05d", "%-6d|", "% d", "%+-9.2f|", "%+09.2f", "%#.0f", "%e", "%.3g", "%s", "%9s", "%-9s|"]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("value", [-1.75, 12.0, 7])
def test_logged_numbers_have_the_format_of_the_message(caplog, form, value):
    values = []

    class Watch:
        started = True

        def late(self, tensor):
            values.append(tensor.item())
            return len(values) - 1

    with output_recorded(lambda stream: False) as printed:
        LOGGER.warning(form, LateNumber(torch.tensor(value, dtype=torch.float64 if value != 7 else None), Watch()))
    printed.emit(values)
    assert [record.getMessage() for record in caplog.records] == [form % value]


def test_numbers_among_the_metrics_are_means():
    batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    pipe = pipeline(talking_step, batch)
    loss = pipe.step(batch).item()
    assert pipe.metrics["loss"] == pytest.approx(loss)
    assert pipe.metrics["half"] == pytest.approx(loss / 2)
    assert pipe.metrics["rows"] == 2
    assert 0 < pipe.metrics["positive"] < 1


def test_number_instead_of_a_loss_is_refused():
    with pytest.raises(RequestError, match=r"returns a number and not a scalar loss.*without \.item\(\)"):
        capture_step(model(), lambda m, x: m(x).mean().item(), torch.ones(2, 4))


def test_step_reads_what_it_prints_into_its_own_text(capsys):
    kept = io.StringIO()

    def is_outside(value):
        return value is kept

    with output_recorded(is_outside) as printed:
        own = io.StringIO()
        print("shape", (2, 3), file=own)
        assert own.getvalue() == "shape (2, 3)\n"
        with contextlib.redirect_stdout(io.StringIO()) as redirected:
            print("hidden")
        assert redirected.getvalue() == "hidden\n"
        print("kept", file=kept)
        print("shown")
        assert kept.getvalue() == ""
    printed.emit([])
    assert (capsys.readouterr().out, kept.getvalue()) == ("shown\n", "kept\n")


@pytest.mark.parametrize(
    "factor",
    [
        lambda loss: 0.0 if str(loss.item()) == "nan" else 1.0, lambda loss: 2.0 if f"{loss:.1f}" == "0.5" else 1.0,
        lambda loss: len(f"{loss.item():.2f}"), lambda loss: float(f"{loss.item():.2f}"),
        lambda loss: {"0": 2.0}.get(f"{loss.item():.0f}", 3.0),
    ],
)  # fmt: skip
def test_a_text_of_a_value_that_the_loss_depends_on_is_that_of_one_process(factor):
    def step(model, batch):
        loss = model(batch).pow(2).mean()
        return loss * factor(loss)

    batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    found = pipeline(step, batch).step(batch)
    expected = panpipe.reference_step(model(), step, batch, microbatches=2)
    torch.testing.assert_close(found, expected)
