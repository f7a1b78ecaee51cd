"""Train with checkpoints, so that a job resumes after a failure: torchrun starts all ranks again.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/resume.py --folder out/checkpoints

Kill a rank while it trains (``KILL_AT=25`` kills rank 1 in step 25, ``KILL_AT=25,40`` in two steps), and the losses
continue as without the failure. It also resumes with another ``--nproc-per-node``: a checkpoint does not depend on the
plan.
"""

import argparse
import os
import signal
from pathlib import Path

import panpipe
import torch
from torch import nn
from torch.optim import lr_scheduler

WIDTH, ROWS = 64, 32


def make_model() -> nn.Module:
    """Three layers with dropout, the same on every rank."""
    torch.manual_seed(0)
    hidden = [part for _ in range(3) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 1))


def batch_of(index: int) -> dict[str, torch.Tensor]:
    """The batch of a step; its index is the number of steps so far, which the checkpoint has."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(index))
    return {"x": x, "y": x.square().mean(1, keepdim=True)}


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """An ordinary training step."""
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def optimizer(named) -> torch.optim.Optimizer:
    """AdamW without weight decay for biases; each stage has both groups, with its own parameters."""
    named = list(named)
    decayed, others = ([p for _, p in named if (p.ndim > 1) is matrix] for matrix in (True, False))
    return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("out/checkpoints"), help="folder of the checkpoints")
    parser.add_argument("--steps", type=int, default=60, help="total number of training steps")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rank, attempt = int(os.environ.get("RANK", "0")), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    deaths = [int(at) for at in os.environ.get("KILL_AT", "").split(",") if at]

    pipe = panpipe.pipeline(
        make_model(), step, batch_of(0), optimizer=optimizer, microbatches=4,
        plan=panpipe.Auto(schedule="1f1b", max_chunks=1),
        update=panpipe.Update(scheduler=lambda made: lr_scheduler.CosineAnnealingLR(made, arguments.steps)),
    )  # fmt: skip
    last = panpipe.latest_checkpoint(arguments.folder)
    if last is not None:
        pipe.resume(last)
    while pipe.metrics.steps < arguments.steps:
        index = pipe.metrics.steps
        if rank == 1 and deaths[attempt : attempt + 1] == [index]:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = pipe.step(batch_of(index)).item()
        if rank == 0:
            print(f"step {index}: loss {loss:.6f}, learning rate {pipe.metrics.learning_rates[0]:.2e}", flush=True)
        if pipe.metrics.steps % arguments.every == 0:
            pipe.checkpoint(arguments.folder / f"step-{pipe.metrics.steps}")
    pipe.close()


if __name__ == "__main__":
    main()
