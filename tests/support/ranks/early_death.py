"""A rank that ends before the ranks have met, started by hand: ``early_death.py HOW VICTIM FOLDER``.

All ranks import torch first, which takes long on a busy machine, and wait for each other in FOLDER: they import panpipe
at the same time.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

Path(sys.argv[3], os.environ["RANK"]).touch()
while not all(Path(sys.argv[3], str(rank)).exists() for rank in range(int(os.environ["WORLD_SIZE"]))):
    time.sleep(0.01)
import panpipe  # noqa: E402 - the ranks import it at the same time

how, victim = sys.argv[1], os.environ["RANK"] == sys.argv[2]


def end() -> None:
    if how.endswith("exception"):
        raise ModuleNotFoundError("No module named 'another'")
    if how.endswith("exit"):
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL)


if victim and how.startswith("import"):
    end()


if victim and how.startswith("group"):
    torch.distributed.init_process_group = lambda *_, **__: end()


def step(model, batch):
    if victim and how.startswith("capture"):
        time.sleep(1)
        end()
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
batch = {"x": torch.ones(4, 8), "y": torch.zeros(4, 4)}
panpipe.pipeline(model, step, batch, optimizer=torch.optim.SGD, microbatches=2, progress=False)
