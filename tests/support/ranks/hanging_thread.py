"""A pipeline of two threads, whose second device hangs in its second step."""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
import panpipe
from panpipe.runtimes.programs.stage_run import StageRun

from tests.support.cuts import captured, even_plan
from tests.support.models import Case

forward, steps = StageRun.forward, [0]


def endless_loop() -> None:
    while True:
        torch.ones(2).sum()


def looping(self, *given, **named):
    if steps[0] == 1 and self.index == 1:
        endless_loop()
    return forward(self, *given, **named)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def step(model, batch):
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


batch = {"x": torch.ones(4, 8), "y": torch.zeros(4, 4)}
case = Case(lambda dtype: model(), step, lambda rows, dtype: batch)
plan = even_plan(captured(case, torch.float32, 4, 2), 2, 2, "1f1b")
StageRun.forward = looping
pipe = panpipe.pipeline(model(), step, batch, optimizer=torch.optim.SGD, plan=plan)
pipe.step(batch)
steps[0] = 1
pipe.step(batch)
