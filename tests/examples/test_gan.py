"""The example with two networks and two optimizers trains each as a loop in one process does."""

import copy
import importlib.util
from pathlib import Path

import panpipe
import torch

from ..laws.grouped import grouped

SPEC = importlib.util.spec_from_file_location("gan", Path(__file__).parents[2] / "examples" / "gan.py")
gan = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(gan)


def test_two_pipelines_train_two_networks_in_turns():
    torch.manual_seed(0)
    nets = {"generator": gan.perceptron(gan.NOISE, 16, 2), "critic": gan.perceptron(2, 16, 1)}
    model = torch.nn.ModuleDict(nets)
    alone = copy.deepcopy(model)
    given = {"microbatches": 4, "progress": False, "schedule": "1f1b"}
    batches = [gan.batch_of(16) for _ in range(4)]
    losses = {"critic": gan.critic_loss, "generator": gan.generator_loss}
    pipes = {
        name: panpipe.pipeline(model, loss, batches[0], **grouped(optimizer=gan.adam(name), **given))
        for name, loss in losses.items()
    }
    optimizers = {name: gan.adam(name)(alone.named_parameters()) for name in losses}
    for batch in batches:
        for name, loss in losses.items():
            wanted = loss(alone, batch)
            alone.zero_grad()
            wanted.backward()
            optimizers[name].step()
            torch.testing.assert_close(pipes[name].step(batch), wanted.detach())
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
