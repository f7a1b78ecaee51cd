"""Pipelines whose stages move to another plan while they train, and others that keep theirs; see `ranks`."""

import copy
from typing import Any

import panpipe
import pytest
import torch
from attrs import evolve
from panpipe.core.capture.python.guards import Guards
from panpipe.core.errors import RequestError
from panpipe.core.lowering.derive import synchronised
from panpipe.core.plan.plan import Plan
from panpipe.core.policies.sharding import LEVELS
from panpipe.core.search import longest_path
from panpipe.runtimes.batch.example import Example
from panpipe.runtimes.diagnose.parity import reference_of_replicas
from panpipe.runtimes.launch.team import Team, ThreadTeam
from panpipe.runtimes.microbatches import split_batch
from panpipe.runtimes.pipeline import Pipeline
from panpipe.runtimes.programs.stage_compiler import ProgramOptions
from panpipe.runtimes.replan.replanner import Replanner
from panpipe.runtimes.settings import PlanningOptions
from panpipe.runtimes.training.averages import WeightAverage
from panpipe.runtimes.update.training import Training
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ..cuts import captured_once, dims_once, even_plan
from ..models import CASES, Case
from ..parity import batches, largest
from ..programs.optimizing import two_groups, warm_up
from ..sharing import shared
from ..training import state_bits
from .teams import SEED, pipeline_on

DTYPE, F64 = torch.float32, torch.float64
CHANGES: dict[str, list[dict[str, Any]]] = {
    "tied gpt with dropout": [{"schedule_name": "v-half", "chunks": 2, "recompute": None}, {}],
    "batchnorm with a skip": [{"schedule_name": "v-half", "chunks": 2}],
}
"""Case → the plans that its stages move to, one after the other, as options of an even plan."""


def plan_of(case: Case, team: Team, dtype: torch.dtype = DTYPE, **options: Any) -> Plan:
    """An even plan over the devices of a team, for updates that clip."""
    plan = even_plan(captured_once(case, dtype, 8, 4), team.size, 4, **options)
    return synchronised(evolve(plan, mesh=team.mesh))


def replanner_of(pipe: Pipeline, case: Case, dtype: torch.dtype = DTYPE) -> Replanner:
    """What plans again for a pipeline."""
    piece = split_batch(case.batch(8, dtype), 4, dims_once(case, dtype, 8, "cpu"))[0]
    example = Example(pipe._session.model, case.step, piece, captured_once(case, dtype, 8, 4))
    options = PlanningOptions(oracle=longest_path, cut_oracle=longest_path)
    return Replanner(example, options, ProgramOptions(), Guards(pipe._session.model, case.step).key)


def replannable(case: Case, team: Team | None = None) -> Pipeline:
    """A pipeline with AdamW, clipping, a scheduler and an average, whose stages can move."""
    team = team or ThreadTeam(2)
    training = Training(clip_norm=0.5, scheduler=lambda made: lr_scheduler.StepLR(made, 2, 0.5))
    pipe = pipeline_on(team, case, 8, 4, torch.optim.AdamW, plan=plan_of(case, team), training=training)
    pipe._session.changes.replanner = replanner_of(pipe, case)
    return pipe


def move(pipe: Pipeline, plan: Plan) -> None:
    """Move its stages to those of a plan."""
    assert pipe._session.changes.replanner is not None
    pipe._session.changes.replanner.move(pipe._trainer, pipe._session.checkpoints, plan)


def moved_and_not(team: Team, name: str) -> dict[str, Any]:
    """The bits of training with stages that move, and of training without, of what this rank holds in the end."""
    case = CASES[name]
    found: dict[str, Any] = {}
    for moves in (True, False):
        pipe = replannable(case, team)
        average, losses = panpipe.weights.ema(pipe, 0.5), []
        for change in (None, *CHANGES[name]):
            if moves and change is not None:
                move(pipe, plan_of(case, team, **change))
            losses += [pipe.step(case.batch(8, DTYPE)).item().hex() for _ in range(2)]
        losses.append(pipe.evaluate(case.batch(8, DTYPE)).item().hex())
        found["moved" if moves else "kept"] = {
            "losses": losses,
            "norm": pipe.metrics.grad_norm,
            "rates": pipe.metrics.learning_rates,
            "counts": [pipe.metrics.steps, pipe.metrics.updates, average.updates],
            "bits": state_bits(pipe, average.tensors),
            "stages": sorted(pipe._session.stage_parameters),
        }
    return found


def moved_while_sharing(team: Team, case: Case, level: str) -> dict[str, float]:
    """Distances from one process of a pipeline whose stages move twice, then with another level of sharding.

    It has clipping, groups of parameters, a scheduler, an average, and batches of several sizes.

    Args:
        team: the ranks.
        case: what is trained.
        level: what replicas share at first.
    """
    training = Training(clip_norm=0.05, scheduler=warm_up)
    model = case.model(F64)
    alone = copy.deepcopy(model)
    stepped = two_groups(item for item in alone.named_parameters() if item[1].requires_grad)
    rates = warm_up(stepped)
    kept = AveragedModel(alone, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    plan = shared(plan_of(case, team, F64), level)
    pipe = pipeline_on(team, case, 8, 4, two_groups, dtype=F64, model=model, plan=plan, training=training)
    pipe._session.changes.replanner = replanner_of(pipe, case, F64)
    average, found, references = (
        panpipe.weights.ema(pipe, 0.5),
        dict[str, float](),
        dict(pipe._session.model.named_parameters()),
    )
    kept.update_parameters(alone)
    with pytest.raises((RequestError, KeyError)):  # and nothing has changed
        move(pipe, plan_of(CASES["batchnorm with a skip"], team))
    after = LEVELS[LEVELS.index(level) - 1]
    moves = {"first": None, "in a v": ({"schedule_name": "v-half", "chunks": 2}, level), f"then {after}": ({}, after)}
    for name, move_to in moves.items():
        if move_to is not None:
            options, shares = move_to
            move(pipe, shared(plan_of(case, team, F64, **options), shares))
        far = 0.0
        for rows in ([8] * team.replicas, [8, 2, 1]):
            parts = batches(case, team.replicas, rows)
            loss = pipe.step(parts[team.replica]).item()
            index = pipe.metrics.steps - 1
            wanted = reference_of_replicas(alone, case.step, parts, microbatches=4, seed=SEED, index=index).item()
            torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
            stepped.step()
            rates.step()
            kept.update_parameters(alone)
            far = largest((far, abs(loss - wanted)))
        found[name] = largest((far, _furthest(pipe, average, alone, kept.module)))
    evaluated = pipe.evaluate(parts[team.replica]).item()
    assert all(evaluated == other for other in team.everywhere(lambda _: evaluated))
    if len(team.local) == team.size:
        assert all(p is references[name] for name, p in pipe._session.model.named_parameters())
    return found


def _furthest(pipe: Pipeline, average: WeightAverage, alone: nn.Module, averaged: nn.Module) -> float:
    """The largest distance of a parameter here, and of its average, from those of one process."""
    wanted, far = dict(alone.named_parameters()), 0.0
    averages = dict(averaged.named_parameters())
    with panpipe.weights.whole_parameters(pipe):
        for name, parameter in pipe._session.model.named_parameters():
            if not parameter.is_meta:
                far = largest((far, (parameter - wanted[name]).abs().max().item()))
                far = largest((far, (average.tensors[name] - averages[name]).abs().max().item()))
    return far
