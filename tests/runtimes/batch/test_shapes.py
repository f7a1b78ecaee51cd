"""Batches of changing shapes: fewer samples than microbatches, other lengths, mixtures, and what is kept of them."""

import gc
import weakref

import pytest
import torch
from panpipe.core.actions import Kind
from panpipe.core.errors import RequestError, WorkerError
from panpipe.runtimes.diagnose.parity import reference_step
from panpipe.runtimes.launch.team import ThreadTeam
from torch import nn
from torch.nn import functional as F

from ...support.cuts import captured
from ...support.models import Case, TinyGPT, gpt_step, tokens, weighted_step
from ...support.parity import PLANS, SEED, Trained

F64 = torch.float64
NEAR = 1e-10
NEW = pytest.mark.filterwarnings("ignore:microbatches of a new shape")
CONV = "batchnorm with a skip"


def small(dtype):
    torch.manual_seed(0)
    return TinyGPT().to(dtype).train()


GPT = Case(small, gpt_step, lambda rows, dtype: tokens(rows))
WEIGHTED = Case(small, weighted_step, lambda rows, dtype: tokens(rows))


def images(rows, size=8):
    generator = torch.Generator().manual_seed(rows + size)
    x = torch.randn(rows, 3, size, size, generator=generator, dtype=F64)
    return {"x": x, "y": torch.randint(0, 3, (rows,), generator=generator)}


# Fewer samples


@NEW
@pytest.mark.parametrize(
    "plan", ["early gradients", *(pytest.param(plan, marks=pytest.mark.slow) for plan in ("zb-h2", "v-half"))]
)
def test_a_batch_of_fewer_samples_than_microbatches_trains(plan):
    pair = Trained(ThreadTeam(2), GPT, 16, 8, **PLANS[plan])
    assert pair.distance([tokens(16), tokens(5), tokens(1), tokens(16)]) < NEAR
    _, trace = pair.pipe.trace_step(tokens(5))
    found = {event.action.microbatch for event in trace.events if event.action.kind is Kind.F}
    assert found == set(range(5))
    assert trace.plan_hash != pair.pipe.plan.hash


@pytest.mark.slow
@NEW
def test_metrics_and_weights_of_fewer_samples():
    case = WEIGHTED
    pair = Trained(ThreadTeam(2), WEIGHTED, 8, 4)
    assert pair.distance([tokens(8), tokens(3), tokens(9)]) < NEAR
    batch, (_, weight, metrics) = tokens(1), case.step(pair.alone.eval(), tokens(1))
    pair.pipe.step(batch)
    assert weight.item() > 0
    assert set(pair.pipe.metrics) == set(metrics)
    assert 0 < pair.pipe.metrics["confidence"] <= 1


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (lambda: tokens(0), "0 samples: a step needs at least one"),
        (
            lambda: {"x": tokens(4)["x"], "y": tokens(3)["y"]},
            "4×12, which is 4 samples, and .* has shape 3×12",
        ),
    ],
)
def test_batch_that_cannot_be_cut_is_refused_in_one_line(batch, said):
    pair = Trained(ThreadTeam(2), GPT, 8, 4)
    with pytest.raises(RequestError, match=said) as refusal:
        pair.pipe.step(batch())
    assert "\n" not in str(refusal.value)
    assert pair.distance([tokens(8)]) < NEAR


@NEW
def test_leaves_are_cut_along_the_dimensions_of_the_example():
    def step(model, batch):
        return (model(batch["x"]) * batch["scale"][0, :, None]).square().mean()

    def batch(rows, dtype=F64):
        return {**vectors(rows), "scale": torch.linspace(1, 2, 4, dtype=F64)[None]}

    pair = Trained(ThreadTeam(2), Case(shortcuts, step, batch), 8, 2)
    whole = pair.pipe.step(batch(8)), pair.pipe.step(batch(4))
    wanted = [step(pair.alone, batch(8))]
    assert abs(whole[0] - wanted[0]) < NEAR
    assert whole[1].isfinite()


# Other lengths and sizes


@NEW
@pytest.mark.parametrize(("name", "devices"), [(GPT, 2), (WEIGHTED, 3)])
@pytest.mark.slow
def test_sequences_of_many_lengths(name, devices):
    pair = Trained(ThreadTeam(devices), name, 8, 4)
    assert pair.distance([tokens(8), tokens(8, 7), tokens(8, 1), tokens(6, 16), tokens(8)]) < NEAR


@pytest.mark.slow
@NEW
def test_images_of_many_sizes():
    pair = Trained(ThreadTeam(2), CONV, 8, 4, **PLANS["split backward"])
    assert pair.distance([images(8), images(6, 5), images(8, 3), images(8)]) < NEAR


class Shortcuts(nn.Module):
    """Messages come and go: several rows take a shortcut, and long sequences another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        start = y = self.first(x)
        if x.shape[0] > 1:
            y = torch.sin(y)
        y = z = self.second(y)
        if x.shape[0] > 1:
            y = y + start
        y = self.third(y)
        if x.shape[1] > 2:
            y = y * start.detach() - z
        return self.last(y)


def shortcuts(dtype):
    torch.manual_seed(0)
    return Shortcuts().to(dtype).train()


def windows(dtype):
    torch.manual_seed(0)
    return Window().to(dtype).train()


def vectors(rows, length=4):
    return {"x": torch.randn(rows, length, 4, dtype=F64, generator=torch.Generator().manual_seed(rows))}


def square(model, batch):
    return model(batch["x"]).square().mean()


@NEW
def test_stage_without_operators_for_a_shape_is_supported():
    case = Case(shortcuts, square, lambda rows, dtype: vectors(rows))
    names = len(captured(case, F64, 4, 2).members)
    pair = Trained(ThreadTeam(names), case, 4, 2)  # an operator a stage
    assert pair.distance([vectors(4), vectors(2), vectors(3), vectors(1, 2), vectors(4)]) < NEAR
    _, trace = pair.pipe.trace_step(vectors(2))
    assert len({event.action.stage for event in trace.events if event.action.kind is Kind.F}) == names


class Window(nn.Module):
    """Two layers read the first four rows of a sequence: all of the example's, which are not apart in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        rows = self.first(x)[:, :4]
        return self.second(rows) * self.third(rows)


@NEW
def test_layers_of_two_stages_that_read_a_part_of_longer_sequences():
    case = Case(windows, square, lambda rows, dtype: vectors(rows))
    pair = Trained(ThreadTeam(len(captured(case, F64, 4, 2).members)), case, 4, 2)  # an operator a stage
    assert pair.distance([vectors(4), vectors(4, 6), vectors(4)]) < NEAR


def _zoo():
    pytest.importorskip("transformers")
    from ...laws.zoo import language, vision  # late: whoever collects tests imports this file

    def text(length, name):
        entry = next(entry for entry in language.LANGUAGE if entry.name == name)

        def batch(rows, length=length):
            before, language.LENGTH = language.LENGTH, length
            try:
                return entry.batch(rows)
            finally:
                language.LENGTH = before

        return entry, batch

    unet = next(entry for entry in vision.VISION if entry.name == "U-Net")

    def pixels(rows, size=32):
        labels = torch.randint(0, vision.CLASSES, (rows, size, size), generator=torch.Generator().manual_seed(1))
        return {"pixel_values": vision.images(rows, size).double(), "labels": labels}

    return {
        "BLOOM": (*text(12, "BLOOM"), [(1, 7)]),
        "U-Net": (unet, pixels, [(3, 16)]),
    }


@NEW
@pytest.mark.slow
@pytest.mark.parametrize("name", ["BLOOM", "U-Net"])
def test_models_of_the_zoo(name):
    entry, batch, shapes = _zoo()[name]

    def model(dtype):
        torch.manual_seed(0)
        return entry.make().to(dtype).train()

    case = Case(model, entry.step, lambda rows, dtype: batch(rows))
    pair = Trained(ThreadTeam(2), case, 4, 2)
    assert pair.distance([batch(*shape) for shape in [(4,), *shapes, (4,)]]) < NEAR


# What is kept


def fixed_length_step(model, batch):
    return gpt_step(model, batch) * int(batch["x"].shape[1] > 0) * (int(batch["x"].shape[1]) / 12)


FIXED = Case(small, fixed_length_step, lambda rows, dtype: tokens(rows))
"""A step whose number of operators could depend on the length."""


@pytest.mark.slow
def test_programs_of_the_most_recent_shapes_are_kept_and_others_are_freed(monkeypatch):
    monkeypatch.setattr("panpipe.runtimes.batch.shapes.NOTICED_S", 0.0)
    monkeypatch.setattr("panpipe.runtimes.batch.shapes._KEPT", 2)
    pair = Trained(ThreadTeam(2), FIXED, 4, 2, programs={"known": {}})
    pipe = pair.pipe
    pair.distance([tokens(4)])
    gone = [weakref.ref(programs.forward) for programs in pipe._session.programs.values()]
    gone += [weakref.ref(p.backward.run) for p in pipe._session.programs.values()]
    gone += [weakref.ref(run) for runs in pipe._trainer.prepared._now.runs.values() for run in runs.values()]
    assert len(gone) == 6
    with pytest.warns(UserWarning, match="shape") as said:
        pair.distance([tokens(4, 5), tokens(4), tokens(4, 6)])
    texts = [str(one.message) for one in said]
    assert [text.split(":")[0] for text in texts] == [
        "microbatches of a new shape (2×5, 2×5)",
        "batches keep changing shape",
    ]
    assert "2 shapes of microbatches are kept" in texts[1]
    assert "pad batches to a few lengths" in texts[1]
    assert all("\n" not in text for text in texts)
    assert all(one.filename.endswith("support/parity.py") for one in said)  # the line that calls step
    assert all(ref() is not None for ref in gone)  # the example's shape was used again in between
    pair.distance([tokens(4, 7)])  # no further warning
    gc.collect()
    assert all(ref() is None for ref in gone)
    assert pair.distance([tokens(4, 6)]) < NEAR


@pytest.mark.parametrize(("values", "said"), [
    ((0.0, 0.1, 0.2), "batch['w'] is 0.1, and 0.0 in the example: the step is captured again for each new value"),
    (("a", "b", "a"), "batch['w'] is 'b', and 'a' in the example: the step is captured again for each new value"),
])  # fmt: skip
def test_a_value_of_the_batch_that_is_no_tensor_is_named_once(values, said):
    def step(model, batch):
        loss = gpt_step(model, batch)
        return loss * batch["w"] if isinstance(batch["w"], float) else loss * len(batch["w"])

    case = Case(small, step, lambda rows, dtype: {**tokens(rows), "w": values[0]})
    pair = Trained(ThreadTeam(2), case, 4, 2)
    with pytest.warns(UserWarning, match="batch") as found:
        assert pair.distance([{**tokens(4), "w": value} for value in values]) < NEAR
    (text,) = [str(one.message) for one in found]
    assert text.startswith(said)
    assert ("torch.tensor(0.1)" in text) == isinstance(values[0], float)


@NEW
def test_pipeline_trains_correctly_after_a_failed_step():
    pair = Trained(ThreadTeam(2), GPT, 4, 2)
    with pytest.raises(RequestError, match=r"with it the step fails: .*models\.py"):
        pair.pipe.step({"x": tokens(4, 5)["x"], "y": tokens(4, 6)["y"]})
    assert pair.distance([tokens(4)]) < NEAR
    with pytest.raises(WorkerError, match="out of range"):
        pair.pipe.step(tokens(4, 17))  # more than there are positions: known when it runs
    assert pair.distance([tokens(4), tokens(3)]) < NEAR


def test_other_parts_of_the_result_are_refused():
    def step(model, batch):
        loss = GPT.step(model, batch)
        return (loss, {"long": loss.detach()}) if batch["x"].shape[1] > 6 else loss

    pair = Trained(ThreadTeam(2), Case(GPT.model, step, lambda rows, dtype: tokens(rows)), 4, 2)
    pair.pipe.step(tokens(4))
    with pytest.raises(RequestError, match=r"returns a loss for microbatches of 2×6.* and a loss, 'long' for the"):
        pair.pipe.step(tokens(4, 6))


# The loss


def narrow(model, batch):
    """A float32 loss of a float64 model."""
    return F.cross_entropy(model(batch["x"]).flatten(0, 1).float(), batch["y"].flatten())


def narrow_weighted(model, batch):
    """The same with a weight that is a tensor."""
    return narrow(model, batch), (batch["y"] > 4).sum()


def narrow_counted(model, batch):
    """The same with a weight that is a number, another one for each shape."""
    return narrow(model, batch), batch["y"].numel() ** 2, {"tokens": batch["y"].numel(), "mean": narrow(model, batch)}


@NEW
@pytest.mark.parametrize(
    "step", [narrow_weighted, *(pytest.param(step, marks=pytest.mark.slow) for step in (narrow, narrow_counted))]
)
def test_loss_of_uneven_microbatches_has_the_bits_of_the_reference(step):
    def model(dtype):
        return GPT.model(dtype).eval()

    pair = Trained(ThreadTeam(2), Case(model, step, lambda rows, dtype: tokens(rows)), 8, 4)
    for index, rows in enumerate((8, 7, 3)):
        batch = tokens(rows)
        found = pair.pipe.step(batch)
        wanted = reference_step(pair.alone, step, batch, microbatches=4, seed=SEED, index=index)
        pair.optimizer.step()
        assert found.dtype == wanted.dtype == torch.float32
        assert torch.equal(found, wanted)
    if step is narrow_counted:
        assert pair.pipe.metrics["tokens"] == 12
