"""What the block of docs/planning.md on 4 ranks needs before it."""

# ruff: noqa: F401
import panpipe
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


torch.manual_seed(0)
model = nn.Sequential()
model.blocks = nn.Sequential(*[Block() for _ in range(4)])
batch = {"x": torch.randn(16, 16), "y": torch.randn(16, 16)}


def step(model, batch):
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])
