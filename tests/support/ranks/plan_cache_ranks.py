"""Ranks with separate cache folders, started by the tests."""

import os
import sys
from pathlib import Path

import panpipe
import torch
from torch import nn


def main(folder: str) -> None:
    rank = os.environ["RANK"]
    os.environ["PANPIPE_CACHE"] = str(Path(folder, rank))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), torch.ones(8, 4)
    phases: list[str] = []
    pipe = panpipe.pipeline(
        model, lambda model, batch: model(batch).square().mean(), batch, microbatches=2,
        plan=panpipe.Auto(schedule="1f1b", max_chunks=1),
        run=panpipe.Run(progress=lambda phase, done, total: phases.append(phase)),
    )  # fmt: skip
    pipe.step(batch)
    planned = any("measuring operators" in phase for phase in phases)
    Path(folder, f"said{rank}").write_text(f"{len(phases) > 0} {planned} {pipe.plan.hash}", encoding="utf-8")
    pipe.close()


if __name__ == "__main__":
    main(sys.argv[1])
