"""Your own training loop, similar to torchtitan's: tokens counted over the whole batch, replicas, meta weights.

    python examples/own_loop.py
    torchrun --nproc-per-node 4 examples/own_loop.py --mesh pp=2,dp=2

The loss of a language model is a mean over valid tokens, and microbatches have unequal numbers of them. The step
returns (loss, number of tokens), and the pipeline divides by the number of the whole batch, over all replicas.
"""

import argparse
import math
import os

import panpipe
import torch
from torch import nn

IGNORED = -100


class Block(nn.Module):
    """A layer of a decoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.after, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.down(nn.functional.gelu(self.up(self.after(x))))


def make_model(width: int = 64, layers: int = 4, vocabulary: int = 64) -> nn.Module:
    """A decoder without weights: each process allocates those of its stages."""
    with panpipe.empty_weights():
        return nn.Sequential(
            nn.Embedding(vocabulary, width), *(Block(width) for _ in range(layers)), nn.Linear(width, vocabulary)
        )


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean over valid tokens, and their number."""
    logits, labels = model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()
    tokens = labels.ne(IGNORED).sum()
    total = nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return total / tokens.clamp(min=1), tokens


def batches(replica: int, count: int):
    """Rows of which some are mostly prompt, without a loss."""
    draw = torch.Generator().manual_seed(replica)
    for _ in range(count):
        tokens = torch.randint(64, (8, 33), generator=draw).sort(1).values
        labels = tokens[:, 1:].clone()
        for row, cut in enumerate(torch.randint(30, (8,), generator=draw).tolist()):
            labels[row, :cut] = IGNORED
        yield {"tokens": tokens[:, :-1], "labels": labels}


def replica_of(rank: int, mesh: str) -> int:
    """The replica of a rank: ranks that differ only in the last dimension of a mesh are neighbours."""
    sizes = {name: int(size) for name, _, size in (part.partition("=") for part in mesh.split(","))}
    names = list(sizes)
    return (
        rank // math.prod(sizes[name] for name in names[names.index("dp") + 1 :]) % sizes["dp"] if "dp" in sizes else 0
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", default="pp=2", help="devices along the pipeline, and replicas")
    parser.add_argument("--steps", type=int, default=20, help="training steps")
    arguments = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))
    data = list(batches(replica_of(rank, arguments.mesh), arguments.steps))
    rate = lambda update: min(1.0, (update + 1) / 5) * 0.5 * (1 + math.cos(math.pi * update / arguments.steps))  # noqa: E731
    update = panpipe.Update(clip_norm=1.0, scheduler=lambda made: torch.optim.lr_scheduler.LambdaLR(made, rate))
    with panpipe.pipeline(
        make_model(), step, data[0], optimizer=lambda named: torch.optim.AdamW(named, lr=3e-3), microbatches=4,
        mesh=arguments.mesh, plan="1f1b", update=update, run=panpipe.Run(progress=False),
    ) as pipe:  # fmt: skip
        for number, batch in enumerate(data):
            loss = pipe.step(batch)
            if rank == 0 and number % 5 == 0:
                print(f"step {number}: loss {loss.item():.4f}, norm {pipe.metrics.grad_norm:.3f}", flush=True)


if __name__ == "__main__":
    main()
