"""One rank of PyTorch's own pipeline runtime, trained by a schedule file of ours over gloo. Started by torchrun.

    torch_ranks.py FOLDER NAME...

Reads ``FOLDER/NAME.csv``. Writes ``FOLDER/NAME.RANK.json`` (each gradient's distance from one process, in norm and
relative; the loss's where the last stage is), and from rank 0 the lowered schedule that PyTorch made of it, as
``FOLDER/NAME.lowered.csv``.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from panpipe.core.schedules.schedule_csv import parse_schedule_csv
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn import functional as F

WIDTH, ROWS = 8, 3


def make_layers(count: int) -> nn.ModuleList:
    """Layers that differ, in float64; the same on every rank."""
    torch.manual_seed(0)
    return nn.ModuleList(
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        for _ in range(count)
    ).double()


def one_process(stages: int, x: torch.Tensor, y: torch.Tensor, microbatches: int) -> tuple[nn.ModuleList, float]:
    """The layers with the gradients of one process over the same microbatches, and the loss."""
    layers, total = make_layers(stages), 0.0
    for inputs, target in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
        loss = F.mse_loss(nn.Sequential(*layers)(inputs), target) / microbatches
        loss.backward()
        total += loss.item()
    return layers, total


def train(folder: Path, name: str) -> None:
    path, rank = folder / f"{name}.csv", dist.get_rank()
    file = parse_schedule_csv(path.read_text(encoding="utf-8"), str(path))
    stages, microbatches = len(file.placement), file.microbatches
    x, y = torch.randn(2, microbatches * ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected, expected_loss = one_process(stages, x, y, microbatches)
    layers = make_layers(stages)
    mine = [stage for stage, device in enumerate(file.placement) if device == rank]
    pipeline = _PipelineScheduleRuntime(
        [PipelineStage(layers[stage], stage, stages, torch.device("cpu")) for stage in mine],
        microbatches,
        loss_fn=F.mse_loss,
    )
    pipeline._load_csv(str(path), format="compute_only")
    losses: list[torch.Tensor] = []
    first, last = 0 in mine, stages - 1 in mine
    pipeline.step(*((x,) if first else ()), **({"target": y, "losses": losses} if last else {}))
    gradients = {
        f"{stage}.{key}": ((parameter.grad - true.grad).norm() / true.grad.norm()).item()
        for stage in mine
        for (key, parameter), true in zip(layers[stage].named_parameters(), expected[stage].parameters(), strict=True)
    }
    loss = abs(torch.stack(losses).mean().item() - expected_loss) if last else None
    (folder / f"{name}.{rank}.json").write_text(json.dumps({"gradients": gradients, "loss": loss}), encoding="utf-8")
    if rank == 0:
        pipeline._dump_csv(str(folder / f"{name}.lowered.csv"), format="compute_comms")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in sys.argv[2:]:
        train(Path(sys.argv[1]), name)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
