"""Samples are in dimension 0: a step that cannot run on fewer of them ends with its own error, never another cut."""

import functools
from typing import Any

import panpipe
import pytest
import torch
from panpipe.core.errors import RequestError
from panpipe.runtimes.diagnose.doctor import check_model
from panpipe.runtimes.launch.team import ThreadTeam
from torch import nn
from torch.nn import functional as F

from ...laws.grouped import grouped

N, T, D = 8, 12, 6
SGD = functools.partial(torch.optim.SGD, lr=0.1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))


def trained(model: nn.Module, step: Any, batch: Any, **options: Any) -> torch.Tensor:
    """The first loss of the default call."""
    options = {"optimizer": SGD, "microbatches": 4, "cache": False, "progress": False, **options}
    with panpipe.pipeline(model, step, batch, **grouped(**options)) as pipe:
        return pipe.step(batch)


class Recurrent(nn.Module):
    """A recurrent layer whose first state the step gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rnn, self.last = nn.Linear(D, D), nn.RNN(D, D, batch_first=True), nn.Linear(D, D)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return self.last(self.rnn(self.first(x), state[None])[0])


def regress(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def with_state_of_the_whole_batch(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch["x"], torch.zeros(N, D)), batch["y"])


def groups_of_four_answers(model: nn.Module, batch: Any) -> torch.Tensor:
    rewards = batch["r"].view(-1, 4)
    return -(model(batch["x"]).mean((1, 2)).view(-1, 4) * (rewards - rewards.mean(1, keepdim=True))).mean()


def returns_of_episodes(model: nn.Module, batch: Any) -> torch.Tensor:
    values, future, total = model(batch["x"]).mean(-1), torch.zeros(N), torch.zeros(())
    for t in reversed(range(T)):
        future = batch["r"][:, t] + 0.9 * future
        total = total + F.mse_loss(values[:, t], future)
    return total


STOPPED = {
    "state": (Recurrent(), with_state_of_the_whole_batch, {"x": (N, T, D), "y": (N, T, D)}, r"\(1, 2, 6\), got .*8, 6"),
    "groups": (mlp(), groups_of_four_answers, {"x": (N, T, D), "r": (N,)}, r"shape '\[-1, 4\]' is invalid.* size 2"),
    "episodes": (mlp(), returns_of_episodes, {"x": (N, T, D), "r": (N, T)}, "broadcast.* 8 "),
}


@pytest.mark.parametrize("case", STOPPED)
def test_step_that_cannot_run_on_fewer_samples_ends_with_its_own_error(case: str) -> None:
    model, step, shapes, reason = STOPPED[case]
    with pytest.raises(RequestError, match=reason) as refused:
        trained(model, step, {name: torch.randn(shape) for name, shape in shapes.items()})
    text = str(refused.value)
    assert "test_samples_in_dimension_0.py:" in text
    assert "change that line" in text
    assert "batch_dims" not in text  # it would not help
    assert "\n" not in text


def contrast(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]) @ model(batch["y"]).T, torch.arange(len(batch["x"])))


def prefer(model: nn.Module, batch: Any) -> torch.Tensor:
    chosen, rejected = model(batch["x"]).mean(1).chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


def weigh_classes(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"].argmax(1), weight=torch.linspace(0.1, 3, D))


def ignore_labels(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["labels"])


def add_up(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"], reduction="sum")


def weigh_samples(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    losses = (model(batch["x"]) - batch["y"]).square().mean(1)
    return (losses * batch["w"]).sum() / batch["w"].sum(), batch["w"].sum()


def weighed(model: nn.Module, batch: Any) -> torch.Tensor:
    return weigh_samples(model, batch)[0]


GENERATOR = torch.Generator().manual_seed(3)
BATCH = {
    "x": torch.randn(N, D, generator=GENERATOR), "y": torch.randn(N, D, generator=GENERATOR),
    "w": torch.rand(N, generator=GENERATOR), "labels": torch.tensor([0, -100, -100, 1, 2, 3, 4, -100]),
}  # fmt: skip
RELATED = {contrast: "mm", prefer: "split", weigh_classes: "nll_loss_forward", ignore_labels: "nll_loss_forward",
           add_up: "mse_loss", weighed: "div"}  # fmt: skip


def values(model: nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("step", RELATED)
def test_loss_that_relates_samples_is_reported_with_both_values(step: Any) -> None:
    torch.manual_seed(5)
    model = mlp()
    with torch.no_grad():
        whole = step(model, BATCH)
    with pytest.warns(UserWarning, match="relates samples") as warned:
        loss = trained(model, step, BATCH, **({} if step is contrast else {"schedule": "1f1b", "max_chunks": 1}))
    (text,) = (str(one.message) for one in warned if "relates samples" in str(one.message))
    assert text.split(":")[-2].endswith(" " + RELATED[step] + " relates samples of the batch")
    assert "test_samples_in_dimension_0.py:" in text
    assert f"the loss is {whole:.6g} for the whole batch and {loss:.6g} as the mean over its 4 microbatches" in text


def noisy() -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Dropout(0.5), nn.Linear(D, D))


@pytest.mark.parametrize(("make", "step"), [(mlp, weigh_samples), (noisy, regress)])
def test_ordinary_losses_are_not_reported(make: Any, step: Any) -> None:
    assert trained(make(), step, BATCH).isfinite()  # warnings are errors here


def test_list_of_ready_made_microbatches_is_refused_with_the_fix() -> None:
    pieces = [{"x": torch.randn(2, D), "y": torch.randn(2, D)} for _ in range(4)]
    with pytest.raises(RequestError, match=r"list of 4 batches.* give one whole batch.*torch\.cat"):
        trained(mlp(), regress, pieces)


@pytest.mark.filterwarnings("ignore:microbatches of a new shape")
def test_doctor_reports_both_losses() -> None:
    assert check_model(mlp(), contrast, BATCH, [lambda: ThreadTeam(2)], microbatches=4).remark
    assert not check_model(mlp(), regress, BATCH, [lambda: ThreadTeam(2)], microbatches=4).remark
