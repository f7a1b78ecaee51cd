"""A generative adversarial network: two networks that are trained in turns, each with its own loss and optimizer.

    python examples/gan.py

Each of the two has a pipeline. Both pipelines have the same model, which contains both networks, and the optimizer of
each takes the parameters of its own network alone, by their names. An actor and a critic are trained in the same way.
"""

import argparse
from itertools import pairwise

import panpipe
import torch
from torch import Tensor, nn

NOISE, WIDTH = 8, 32


def perceptron(*sizes: int) -> nn.Sequential:
    """Linear layers with an activation between them."""
    hidden = [nn.Sequential(nn.Linear(a, b), nn.LeakyReLU(0.2)) for a, b in pairwise(sizes[:-1])]
    return nn.Sequential(*hidden, nn.Linear(*sizes[-2:]))


def critic_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """How well the critic separates points of the data from points of the generator."""
    real = model["critic"](batch["points"])
    fake = model["critic"](model["generator"](batch["noise"]).detach())
    return nn.functional.softplus(-real).mean() + nn.functional.softplus(fake).mean()


def generator_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """How well the generator's points pass for points of the data."""
    return nn.functional.softplus(-model["critic"](model["generator"](batch["noise"]))).mean()


def adam(network: str):
    """A function that creates the optimizer of one network, for those of its parameters that a stage holds."""

    def optimizer(named):
        own = [(name, parameter) for name, parameter in named if name.startswith(f"{network}.")]
        return torch.optim.Adam(own, lr=1e-2, betas=(0.5, 0.9)) if own else None

    return optimizer


def batch_of(rows: int) -> dict[str, Tensor]:
    """Points on a circle, and noise."""
    angle = 2 * torch.pi * torch.rand(rows)
    return {"points": torch.stack([angle.cos(), angle.sin()], -1), "noise": torch.randn(rows, NOISE)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="training steps of each network")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = nn.ModuleDict({"generator": perceptron(NOISE, WIDTH, WIDTH, 2), "critic": perceptron(2, WIDTH, WIDTH, 1)})
    given = {"microbatches": 4, "run": panpipe.Run(progress=False)}
    example = batch_of(64)
    critic = panpipe.pipeline(model, critic_loss, example, optimizer=adam("critic"), **given)
    generator = panpipe.pipeline(model, generator_loss, example, optimizer=adam("generator"), **given)
    with critic, generator:
        for number in range(arguments.steps):
            batch = batch_of(64)
            losses = critic.step(batch), generator.step(batch)
            if number % 50 == 0 or number == arguments.steps - 1:
                print(f"step {number}: critic {losses[0].item():.3f}, generator {losses[1].item():.3f}", flush=True)
        radius = generator.forward(batch, lambda model, batch: model["generator"](batch["noise"])).norm(dim=-1)
    print(f"the generator's points have distances from the centre of {radius.mean():.2f} ± {radius.std():.2f}")


if __name__ == "__main__":
    main()
