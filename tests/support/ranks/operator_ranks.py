"""Ranks whose losses are not finite, and whose steps are monitored; see `ranks`."""

import math
from typing import Any

import panpipe
import torch
from attrs import asdict
from panpipe.runtimes.launch.team import Team
from panpipe.runtimes.update.training import Training

from ..parity import largest
from ..programs.infinite_gradient import ROOT, root_batch
from ..programs.poison import LAYERS, POISONED, Skipping, poisoned_batch
from ..training import SGD, parameters, unequal
from .teams import pipeline_on


def skipped_together(team: Team) -> dict[str, Any]:
    """Steps of which the second has a loss that is not finite in the last replica, and is skipped by all."""
    alone = Skipping(POISONED.model(torch.float32))
    pipe = pipeline_on(team, POISONED, 8, 4, SGD, training=Training(on_nonfinite="skip"))
    skipped = []
    for poisoned in (False, True, False):
        batches = [poisoned_batch(8, torch.float32) for _ in range(team.replicas)]
        if poisoned:
            batches[-1] = poisoned_batch(8, torch.float32, LAYERS - 1, 4)
        pipe.step(batches[team.replica])
        alone.step(*batches)
        skipped.append(pipe.metrics.skipped)
    own, wanted = parameters(pipe._session.model), parameters(alone.model)
    return {
        "skipped": skipped,
        "stages": sorted(pipe._session.stage_parameters),
        "bits": {name: p.flatten().tolist() for name, p in own.items()},
        "distance": largest((p - wanted[name]).abs().max().item() for name, p in own.items()),
        "raised": _raised(team),
        "raised for the norm": _raised_for_the_norm(team),
    }


def _raised(team: Team) -> list[Any]:
    pipe = pipeline_on(team, POISONED, 8, 4, SGD, training=Training(on_nonfinite="raise"))
    poisoned = team.replica == team.replicas - 1
    batch = poisoned_batch(8, torch.float32, LAYERS - 1 if poisoned else None, 4, math.inf)
    try:
        pipe.step(batch)
    except panpipe.NonFiniteError as failure:
        return [str(failure), failure.stage, failure.microbatch, failure.replica]
    return []


def _raised_for_the_norm(team: Team) -> list[Any]:
    """A step in which the loss of the last replica is finite, and one of its gradients is not."""
    pipe = pipeline_on(team, ROOT, 8, 4, SGD, training=Training(on_nonfinite="raise", clip_norm=1.0))
    before = parameters(pipe._session.model)
    try:
        pipe.step(root_batch(8, torch.float32, zero=team.replica == team.replicas - 1))
    except panpipe.NonFiniteError as failure:
        changed = unequal(parameters(pipe._session.model), before)
        return [str(failure), failure.stage, changed]
    return []


def monitored_steps(team: Team) -> dict[str, Any]:
    """The reports of two steps, on the rank whose monitors are called."""
    reports: list[panpipe.monitors.StepReport] = []
    pipe = pipeline_on(team, POISONED, 8, 4, SGD, training=Training(clip_norm=1.0), monitors=[reports.append])
    for _ in range(2):
        pipe.step(poisoned_batch(8, torch.float32))
    return {"reports": [asdict(report) for report in reports], "norm": pipe.metrics.grad_norm}
