"""Ranks that train with clipping, accumulation and scaled losses, compared with one process on all their batches; see
`ranks`."""

from collections.abc import Callable
from typing import Any

import panpipe
import torch
from panpipe import RequestError
from panpipe.runtimes.launch.team import Team
from panpipe.runtimes.update.training import Training
from torch import nn

from ..models import CASES, Case
from ..parity import batches
from ..programs.scaling import LAYERS, TAPPED, Alone, Scaler, tapped_batch
from ..training import SGD, gradients, on_team, parameters, under_autocast

OPTIONS = {"init_scale": 2.0**10, "growth_interval": 2}
LOWER = {name: under_autocast(CASES[name], torch.bfloat16) for name in ("batchnorm with a skip", "token-weighted")}
"""Cases whose steps are in bfloat16."""


def scaled(team: Team, shard: str = "none") -> dict[str, Any]:
    """Updates of a step in float16, each by one batch of each replica or two; in some of them a gradient overflows, in
    one stage of one replica."""
    last = team.replicas - 1

    def whole(*overflows: tuple[int, int]) -> list[Any]:
        """A batch for each replica; (replica, tap) of gradients that overflow."""
        taps = dict(overflows)
        return [tapped_batch(8, torch.float32, taps.get(r)) for r in range(team.replicas)]

    clean, uneven = whole(), [tapped_batch(rows, torch.float32) for rows in (8, 5, 7)[: team.replicas]]
    updates = [
        [clean],
        [whole((last, LAYERS - 1))],  # the last stage of the last replica
        [clean, clean],
        [whole((0, 0)), clean],  # the first stage of the first replica, whose gradients wait
        [clean, whole((last, 0))],
        [uneven],
        [clean],
    ]
    return {"float16": _trained(team, TAPPED, updates, OPTIONS, 0.05, shard)}


def in_bfloat16(team: Team) -> dict[str, Any]:
    """Updates of steps in bfloat16, by one batch of each replica or two, with nothing scaled."""
    found = {}
    for name, case in LOWER.items():
        whole = batches(CASES[name], team.replicas, [8] * team.replicas, torch.float32)
        found[name] = _trained(team, case, [[whole], [whole, whole]], {"enabled": False}, 0.05)
    return found


def _trained(
    team: Team,
    case: Case,
    updates: list[list[list[Any]]],
    options: dict[str, Any],
    clip_norm: float,
    shard: str = "none",
) -> dict[str, Any]:
    scaler = Scaler(**options)
    pipe, model = on_team(team, case, Training(clip_norm=clip_norm, scaler=scaler), shard)
    alone = Alone(case, model, SGD, clip_norm, **options)
    found: dict[str, Any] = {"skipped": [], "scale": [], "norm": [], "distance": []}
    for waiting in updates:
        for index, parts in enumerate(waiting):
            pipe.step(parts[team.replica], update=index == len(waiting) - 1)
        samples = [float(_weight(case, parts)) for parts in waiting]
        skipped = alone.step(*waiting, weights=samples)
        found["skipped"].append([pipe.metrics.skipped, skipped])
        found["scale"].append([scaler.get_scale(), alone.scaler.get_scale()])
        found["norm"].append([pipe.metrics.grad_norm, alone.norm])
        with panpipe.weights.whole_parameters(pipe):
            found["distance"].append(_distance(pipe._session.model, alone.model))
    with panpipe.weights.whole_parameters(pipe):
        bits = {name: p.flatten().tolist() for name, p in parameters(pipe._session.model).items()}
    dtypes = sorted({str(t.dtype) for pair in pipe._trainer.prepared.shapes.latest.layout.values() for t in pair})
    return {**found, "updates": pipe.metrics.updates, "bits": bits, "dtypes": dtypes}


def _weight(case: Case, parts: list[Any]) -> int:
    """What the batches of all replicas count together."""
    if case.batch is CASES["batchnorm with a skip"].batch or case is TAPPED:
        return sum(len(part["y"]) for part in parts)
    return sum(int((part["y"] > 8).sum()) for part in parts)


def _distance(mine: nn.Module, alone: nn.Module) -> float:
    """The largest between parameters here, and between their gradients, where these are finite."""
    found = 0.0
    for take in (parameters, gradients):
        here, wanted = take(mine), take(alone)
        for name, value in here.items():
            if not value.is_meta:
                assert torch.equal(value.isfinite(), wanted[name].isfinite())
                found = max(found, (value - wanted[name]).nan_to_num(0.0, 0.0, 0.0).abs().max().item())
    return found


def refusal(ask: Callable[[], Any]) -> str:
    """What it says."""
    try:
        ask()
    except RequestError as said:
        return str(said)
    return "nothing"


def step_apart(team: Team) -> None:
    """A step after one rank's scaler was given another scale."""
    scaler = Scaler(**OPTIONS)
    pipe, _ = on_team(team, TAPPED, Training(scaler=scaler))
    batch = tapped_batch(8, torch.float32)
    pipe.step(batch)
    if team.first:
        scaler.update(2.0)
    pipe.step(batch)
