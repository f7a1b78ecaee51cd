"""A rank that ends while the pipeline is built, started by hand: ``early_death.py HOW VICTIM FOLDER``.

All ranks import first, which takes long on a busy machine, and wait for each other in FOLDER: they call
``panpipe.pipeline`` at the same time, or one after the end of the other.
"""

import os
import signal
import sys
import time
from pathlib import Path

import panpipe
import torch
from torch import nn

folder, rank = Path(sys.argv[3]), int(os.environ["RANK"])
how, victim = sys.argv[1], rank == int(sys.argv[2])


def wait_for(*names: str) -> None:
    while not all(Path(folder, name).exists() for name in names):
        time.sleep(0.01)


Path(folder, str(rank)).touch()
wait_for(*(str(other) for other in range(int(os.environ["WORLD_SIZE"]))))
if how.startswith("alone") and not victim:
    wait_for("victim ended")


def end() -> None:
    if how.endswith("exception"):
        raise ModuleNotFoundError("No module named 'another'")
    if how.endswith("exit"):
        os._exit(3)
    os.kill(os.getpid(), signal.SIGSTOP if how.endswith("stopped") else signal.SIGKILL)


if victim and how.startswith("group"):
    torch.distributed.init_process_group = lambda *_, **__: end()


if victim and how.startswith("alone"):
    end()


def step(model, batch):
    if victim and how.startswith("capture"):
        time.sleep(1)
        end()
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
batch = {"x": torch.ones(4, 8), "y": torch.zeros(4, 4)}
panpipe.pipeline(model, step, batch, optimizer=torch.optim.SGD, microbatches=2, run=panpipe.Run(progress=False))
