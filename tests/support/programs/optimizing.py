"""Optimizers, schedulers and pipelines for tests of them."""

from typing import Any

import attrs
import panpipe
import torch
from attrs import evolve
from panpipe.runtimes.launch.team import Team, ThreadTeam
from panpipe.runtimes.pipeline import Pipeline
from panpipe.runtimes.update.training import Training
from torch import nn
from torch.optim import lr_scheduler

from ...laws.grouped import grouped
from ..cuts import captured, captured_once, even_plan
from ..models import CASES, Case
from ..ranks.teams import SEED, pipeline_on

F32 = torch.float32


def two_groups(named: Any) -> torch.optim.Optimizer:
    """AdamW with no weight decay, and another learning rate, for what is no matrix."""
    named = list(named)
    flat = [p for _, p in named if p.ndim < 2]
    return torch.optim.AdamW(
        [{"params": [p for _, p in named if p.ndim > 1]}, {"params": flat, "weight_decay": 0.0, "lr": 5e-3}],
        lr=1e-2,
        weight_decay=0.1,
    )


def warm_up(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """Three updates up, then along a cosine."""
    up = lr_scheduler.LambdaLR(optimizer, lambda update: (update + 1) / 3)
    return lr_scheduler.SequentialLR(optimizer, [up, lr_scheduler.CosineAnnealingLR(optimizer, 10)], milestones=[3])


def pipe_of(name: str, devices: int = 2, model: nn.Module | None = None, **options: Any) -> Pipeline:
    """A pipeline of threads by an even plan, 8 rows in 4 microbatches."""
    case, cut = CASES[name], {key: options.pop(key) for key in ("schedule_name", "chunks") if key in options}
    frozen = model is not None and not all(p.requires_grad for p in model.parameters())
    options = {"optimizer": two_groups, "seed": SEED, **options}
    if not frozen and all(key in attrs.fields_dict(Training) for key in options):
        training = Training(**options)
        return pipeline_on(
            ThreadTeam(devices), case, 8, 4, training.optimizer, plan_options=cut, model=model, training=training,
            seed=training.seed,
        )  # fmt: skip
    operators = captured(evolve(case, model=lambda _: model), F32, 8, 4) if frozen else captured_once(case, F32, 8, 4)
    plan = even_plan(operators, devices, 4, **cut)
    return panpipe.pipeline(model or case.model(F32), case.step, case.batch(8, F32), **grouped(plan=plan, **options))


def on_mesh(team: Team, case: Case, microbatches: int = 4) -> Pipeline:
    """A pipeline over ranks that has as many microbatches in all replicas together."""
    rows, each = 8 // team.replicas, microbatches // team.replicas
    return pipeline_on(team, case, rows, each, two_groups, training=Training(scheduler=warm_up))


def train(pipe: Pipeline, name: str, steps: int) -> list[float]:
    """Losses of some steps on batches that differ."""
    found = []
    for _ in range(steps):
        batch = CASES[name].batch(8 + pipe.metrics.steps, F32)
        found.append(pipe.step({key: value[pipe.metrics.steps :] for key, value in batch.items()}).item())
    return found


def everything(pipe: Pipeline) -> dict[str, torch.Tensor]:
    """All tensors of its state, cloned: parameters, buffers, what optimizers keep."""
    state = pipe.state_dict()
    tensors = {**state["model"], **{k: v for k, v in state["optimizer"].items() if isinstance(v, torch.Tensor)}}
    return {name: tensor.clone() for name, tensor in tensors.items()}
