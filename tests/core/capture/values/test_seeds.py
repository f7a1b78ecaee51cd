"""Steps that set a seed and draw: eager PyTorch repeats the numbers in each step, keyed streams do not."""

import pytest
import torch
from panpipe.core.capture.export.step import capture_step
from panpipe.core.errors import RequestError
from torch import Tensor, nn


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)


def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return x + torch.randn_like(x)


def seeded_in_fork(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return x + torch.rand(x.shape)


def own_generator(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return x + torch.randn(x.shape, generator=generator)


def default_generator(x: Tensor) -> Tensor:
    torch.default_generator.manual_seed(5)
    return x.bernoulli(0.5) + x


def repeated_state(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    noise = torch.randn_like(x)
    torch.set_rng_state(state)
    return x + noise * torch.randn_like(x)


def drawn(x: Tensor) -> Tensor:
    return nn.functional.dropout(x + torch.randn_like(x), 0.1)


def seeded_without_draw(x: Tensor) -> Tensor:
    seed_all(0)
    return x


def capture(noise):
    def step(model, batch):
        return noise(model(batch)).square().mean()

    return capture_step(nn.Linear(4, 4), step, torch.randn(8, 4))


@pytest.mark.parametrize(
    "noise",
    [seeded, seeded_in_fork, own_generator, default_generator, repeated_state],
    ids=lambda noise: noise.__name__,
)
def test_step_that_sets_a_seed_and_draws_is_refused_with_its_line(noise):
    with pytest.raises(
        RequestError, match=r"test_seeds\.py:\d+ in .*sets the seed or the state .* set the seed before"
    ):
        capture(noise)


@pytest.mark.parametrize("noise", [drawn, seeded_without_draw], ids=lambda noise: noise.__name__)
def test_seed_before_the_step_and_seed_without_draw_are_allowed(noise):
    torch.manual_seed(0)
    capture(noise)
