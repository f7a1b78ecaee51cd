"""Samples are in dimension 0: a step that cannot run on fewer of them ends with its own error, never another cut."""

import functools
from typing import Any

import panpipe
import pytest
import torch
from panpipe.core.errors import RequestError
from torch import nn
from torch.nn import functional as F

N, T, D = 8, 12, 6
SGD = functools.partial(torch.optim.SGD, lr=0.1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))


def trained(model: nn.Module, step: Any, batch: Any, **options: Any) -> torch.Tensor:
    """The first loss of the default call."""
    options = {"optimizer": SGD, "microbatches": 4, "plan_cache": False, "progress": False, **options}
    with panpipe.pipeline(model, step, batch, **options) as pipe:
        return pipe.step(batch)


class Recurrent(nn.Module):
    """A recurrent layer whose first state the step gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rnn, self.last = nn.Linear(D, D), nn.RNN(D, D, batch_first=True), nn.Linear(D, D)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return self.last(self.rnn(self.first(x), state[None])[0])


class Centred(nn.Module):
    """Subtracts a running mean, and returns one column."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 1)
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return self.last(torch.relu(h - self.mean))


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


def test_targets_of_one_column_are_cut_with_their_rows() -> None:
    batch = {"x": torch.randn(N, D), "y": torch.randn(N, 1)}
    assert trained(Centred(), regress, batch).isfinite()
