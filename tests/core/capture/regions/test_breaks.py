"""Steps that need values: what stays Python, what that costs the rest, and what is refused."""

import ctypes
import json
import struct

import pytest
import torch
from panpipe.core.capture.export.operators import operators_of
from panpipe.core.capture.export.step import capture_step
from panpipe.core.errors import RequestError
from panpipe.runtimes.diagnose.doctor import CheckedModel
from panpipe.runtimes.launch.team import ThreadTeam
from torch import nn
from torch.nn import functional as F

WIDTH = 8
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*the loss does not depend on it",
    "ignore:microbatches of a new shape",  # the doctor trains other sizes, too
)


class Clipped(nn.Module):
    """Scales down what is too large; draws random numbers; counts how often it did."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("clipped", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(self.linear(x), 0.2, self.training)
        if y.abs().max() > 0.5:
            self.clipped += 1
            y = 0.5 * y / y.abs().max()
        return y


class Around(nn.Module):
    """Clipping blocks between others, with dropout on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2))
        self.blocks = nn.ModuleList(Clipped() for _ in range(2))
        self.last = nn.Sequential(nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def mean_step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).pow(2).mean()


def branching_step(model: nn.Module, x: torch.Tensor):
    """Branches on the loss, clips a parameter's norm by hand, and returns Python numbers."""
    out = model(x)
    loss = out.pow(2).mean()
    if loss > 1e-3:
        loss = loss + 0.1 * model.last[1].weight.norm()
    count = 0
    while count < 3 and float(out.detach().abs().mean()) > 0.1 * count:
        count += 1
    return loss * (1 + count), {"count": count, "size": float(out.detach().norm())}


def end_step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    return out.mean() if out.isnan().any() else out.pow(2).mean()


def batch(rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("step", [mean_step, branching_step])
def test_untraced_regions_train_like_one_process(step):
    torch.manual_seed(0)
    checked = CheckedModel(Around().train(), step, batch(), 3)
    check = checked.check(ThreadTeam(2), "v-half", 2)
    assert check.distance.within(1e-12, 1e-12), check


def test_the_end_of_a_step_is_one_operator_and_the_model_stays_cut():
    operators = operators_of(capture_step(nn.Sequential(*Around().first, nn.Linear(WIDTH, 1)), end, batch(2)))
    assert list(operators.step.regions) == ["the end of the step"]
    assert [node.name for node in operators.graph.nodes][-3:] == ["/median", "/gt", "/run"]


class Images:
    """A list of tensors with more about them, as detectors of torchvision pass it on."""

    def __init__(self, tensors: torch.Tensor, sizes: list[int]) -> None:
        self.tensors, self.sizes = tensors, sizes


class Preparing(Clipped):
    """Returns a plain object."""

    def forward(self, x: torch.Tensor) -> Images:
        y = super().forward(x)
        return Images(y, [len(y)])


class Prepared(nn.Module):
    """A part that stays Python between others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.prepare, self.last = nn.Linear(WIDTH, WIDTH), Preparing(), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = self.prepare(self.first(x))
        return self.last(images.tensors) / images.sizes[0]


def test_a_region_may_return_an_object_with_tensors():
    torch.manual_seed(0)
    check = CheckedModel(Prepared().train(), mean_step, batch(), 3).check(ThreadTeam(2), "1f1b", 1)
    assert check.distance is not None, check
    assert check.distance.within(1e-12, 1e-12), check


def end(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(x).squeeze(-1)
    return out[out > out.median()].sum() + out.pow(2).sum()


def test_a_region_whose_results_change_shape_is_refused_with_the_line():
    class Picking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[x.sum(-1) > 0]

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.picking, self.after = nn.Linear(WIDTH, WIDTH), Picking(), nn.Linear(WIDTH, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.after(self.picking(self.before(x)))

    torch.manual_seed(0)  # with these weights it picks other numbers of rows from the two microbatches
    checked = CheckedModel(Whole(), mean_step, batch(8), 2)
    problem = checked.check(ThreadTeam(2), "1f1b", 1).problem
    assert "test_breaks.py" in problem
    assert "its results must keep their shapes" in problem


def test_end_of_step_that_reads_other_outputs_is_refused_with_the_line():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.first(x), self.second(x)

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        one, other = model(x)
        return one.mean() if x.sum() > 0 else other.mean()

    x = torch.cat((torch.ones(2, WIDTH), -torch.ones(2, WIDTH)))
    checked = CheckedModel(Two(), step, x, 2)
    problem = checked.check(ThreadTeam(2), "1f1b", 1).problem
    assert "test_breaks.py" in problem
    assert "did not read for the example" in problem


def test_a_region_with_sparse_gradients_is_refused_with_the_line():
    class Picking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(WIDTH, WIDTH, sparse=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.table(torch.tensor([int(x.detach().argmax()) % WIDTH]))

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Picking(), nn.Linear(WIDTH, 1))
    problem = CheckedModel(model, mean_step, batch(4), 2).check(ThreadTeam(2), "1f1b", 1).problem
    assert "test_breaks.py" in problem
    assert "module '1' has sparse gradients" in problem


@pytest.mark.parametrize("step", [mean_step, end_step])
def test_a_model_without_values_is_captured_like_one_with(step):
    x = batch(2)
    bare, whole = (operators_of(capture_step(model, step, x)) for model in (Around().to("meta"), Around()))
    assert bare.graph.hash == whole.graph.hash
    assert bare.step.regions == whole.step.regions
    assert bare.first_draw == whole.first_draw


def test_end_of_step_of_a_model_too_large_to_run_is_refused_with_the_line(monkeypatch):
    monkeypatch.setattr("panpipe.core.capture.regions.breaks._STAND_INS", 100)
    with pytest.raises(RequestError, match=r"test_breaks\.py:\d+ in branching_step: .* needs a value .* meta device"):
        capture_step(Around().to("meta"), branching_step, batch(2))


class Particular(nn.Module):
    """Wants a plain tensor, which the tracer does not show it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert type(x) is torch.Tensor
        return x.tanh()


class Foreign(nn.Module):
    """Hands the address of its tensor to foreign code, as the tracer cannot."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        (first,) = struct.unpack("d", ctypes.string_at(x.data_ptr(), 8))
        return x * first


@pytest.mark.parametrize("middle", [Particular, Foreign])
def test_module_that_cannot_be_traced_becomes_a_region(middle):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), middle(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    checked = CheckedModel(model.train(), mean_step, batch(), 3)
    assert list(checked.operators.step.regions) == ["2"]
    assert len(checked.operators.graph.nodes) >= 5
    check = checked.check(ThreadTeam(2), "v-half", 2)
    assert check.distance is not None, check
    assert check.distance.within(1e-12, 1e-12), check


def guarded_step(model: nn.Module, x: torch.Tensor):
    """Looks at the loss only to stop at a wrong one."""
    loss = model(x).pow(2).mean()
    if torch.isnan(loss):
        raise FloatingPointError("not a number")
    return loss


GENERATOR = torch.Generator()


def written_step(model: nn.Module, x: torch.Tensor):
    """Writes its log as JSON, and draws from a generator that was made before."""
    noise = torch.randn(x.shape, generator=GENERATOR, dtype=x.dtype)
    loss = model(x + 0.1 * noise).pow(2).mean()
    print(json.dumps({"loss": round(loss.item(), 3)}))
    return loss


@pytest.mark.parametrize("step", [guarded_step, written_step])
def test_checks_and_logs_at_the_end_of_a_step_train_like_one_process(step):
    torch.manual_seed(0)
    model = nn.Sequential(*Around().first, nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    checked = CheckedModel(model.train(), step, batch(), 3)
    assert list(checked.operators.step.regions) == ["the end of the step"]
    check = checked.check(ThreadTeam(2), "v-half", 2)
    assert check.distance is not None, check
    assert check.distance.within(1e-12, 1e-12), check
