"""What the block of docs/migration.md on 2 ranks needs before it."""

# ruff: noqa: F401
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy

dist.init_process_group("gloo")
rank, device = dist.get_rank(), torch.device("cpu")
torch.manual_seed(0)
first, second = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
loader = [{"x": torch.randn(16, 16), "y": torch.randint(16, (16,))} for _ in range(2)]
