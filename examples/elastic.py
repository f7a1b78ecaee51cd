"""Train with two replicas on two nodes, and continue with one replica when a node is lost.

On each of two nodes:

    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        --rdzv-id elastic examples/elastic.py --folder /shared/checkpoints

A node has the two ranks of a replica. When a node dies, torchrun starts the ranks of the other one again, and the job
resumes from the last checkpoint with ``dp=1``. An update still uses the same samples: with fewer replicas each one
accumulates several batches. When the node is back, torchrun starts all ranks again, with ``dp=2``.

The order of sums differs between one and two replicas, so that results are equal to rounding and not to the last bit.
Random operators such as dropout would draw other numbers, because one replica makes two steps for an update.
"""

import argparse
import os
from pathlib import Path

import panpipe
import torch
from torch import nn
from torch.optim import lr_scheduler

STAGES = 2
BATCHES, ROWS = 2, 32
"""Batches of an update, which the replicas divide among them, and samples of a batch."""
WIDTH = 64


def make_model() -> nn.Module:
    """Four layers, the same on every rank."""
    torch.manual_seed(0)
    hidden = [part for _ in range(3) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 1))


def batch_of(update: int, number: int) -> dict[str, torch.Tensor]:
    """One batch of an update."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(update * BATCHES + number))
    return {"x": x, "y": x.square().mean(1, keepdim=True)}


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """An ordinary training step."""
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def update_once(pipe: panpipe.Pipeline, replica: int, replicas: int) -> float:
    """One update by all batches; each replica takes every ``replicas``-th one. Returns their mean loss."""
    own = [batch_of(pipe.metrics.updates, number) for number in range(replica, BATCHES, replicas)]
    losses = [pipe.step(batch, update=batch is own[-1]).item() for batch in own]
    return sum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("out/elastic"), help="folder of the checkpoints")
    parser.add_argument("--updates", type=int, default=60, help="total number of updates")
    parser.add_argument("--every", type=int, default=10, help="updates between checkpoints")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rank, replicas = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) // STAGES
    if not replicas or BATCHES % replicas:
        raise SystemExit(f"{replicas} replicas cannot divide the {BATCHES} batches of an update equally")

    pipe = panpipe.pipeline(
        make_model(), step, batch_of(0, 0), optimizer=torch.optim.AdamW, microbatches=4,
        mesh=f"dp={replicas},pp={STAGES}", plan=panpipe.Auto(schedule="1f1b", max_chunks=1),
        update=panpipe.Update(scheduler=lambda made: lr_scheduler.CosineAnnealingLR(made, arguments.updates)),
        run=panpipe.Run(progress=False),
    )  # fmt: skip
    last = panpipe.latest_checkpoint(arguments.folder)
    if last is not None:
        pipe.resume(last)
    while pipe.metrics.updates < arguments.updates:
        loss = update_once(pipe, rank // STAGES, replicas)
        if rank == 0:
            print(f"update {pipe.metrics.updates}: loss {loss:.9f}, {replicas} replicas", flush=True)
        if pipe.metrics.updates % arguments.every == 0:
            pipe.checkpoint(arguments.folder / f"update-{pipe.metrics.updates}")
    pipe.save(arguments.folder / "trained")
    pipe.close()


if __name__ == "__main__":
    main()
