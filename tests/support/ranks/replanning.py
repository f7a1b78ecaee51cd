"""Pipelines whose stages move to another plan while they train, and others that keep theirs; see `ranks`."""

from typing import Any
from zlib import crc32

import torch
from attrs import evolve
from panpipe.core.capture.python.reads import Reads
from panpipe.core.plan.derive import synchronised
from panpipe.core.plan.plan import Plan
from panpipe.core.search import longest_path
from panpipe.runtimes.batch.example import Example
from panpipe.runtimes.batch.microbatches import split_batch
from panpipe.runtimes.launch.team import Team, ThreadTeam
from panpipe.runtimes.optimizer.training import Training
from panpipe.runtimes.pipeline import Pipeline
from panpipe.runtimes.planning.options import PlanningOptions
from panpipe.runtimes.programs.options import ProgramOptions
from panpipe.runtimes.replan.replanner import Replanner
from torch.optim import lr_scheduler

from ..cuts import captured_once, dims_once, even_plan
from ..models import CASES, Case
from .teams import pipeline_on

DTYPE = torch.float32
CHANGES: dict[str, list[dict[str, Any]]] = {
    "tied gpt with dropout": [{"schedule_name": "v-half", "chunks": 2, "recompute": None}, {}],
    "batchnorm with a skip": [{"schedule_name": "v-half", "chunks": 2}],
}
"""Case → the plans that its stages move to, one after the other, as options of an even plan."""


def plan_of(case: Case, team: Team, **options: Any) -> Plan:
    """An even plan over the devices of a team, for updates that clip."""
    plan = even_plan(captured_once(case, DTYPE, 8, 4), team.size, 4, **options)
    return synchronised(evolve(plan, mesh=team.mesh))


def replanner_of(pipe: Pipeline, case: Case) -> Replanner:
    """What plans again for a pipeline."""
    piece = split_batch(case.batch(8, DTYPE), 4, dims_once(case, DTYPE, 8, "cpu"))[0]
    example = Example(pipe.model, case.step, piece, captured_once(case, DTYPE, 8, 4))
    options = PlanningOptions(oracle=longest_path, cut_oracle=longest_path)
    return Replanner(example, options, ProgramOptions(), Reads(pipe.model, case.step).key)


def replannable(case: Case, team: Team | None = None) -> Pipeline:
    """A pipeline with AdamW, clipping, a scheduler and an average, whose stages can move."""
    team = team or ThreadTeam(2)
    training = Training(clip_norm=0.5, scheduler=lambda made: lr_scheduler.StepLR(made, 2, 0.5))
    pipe = pipeline_on(team, case, 8, 4, torch.optim.AdamW, plan=plan_of(case, team), training=training)
    pipe.replanner = replanner_of(pipe, case)
    return pipe


def move(pipe: Pipeline, plan: Plan) -> None:
    """Move its stages to those of a plan."""
    assert pipe.replanner is not None
    pipe.replanner.move(pipe._trainer, pipe.checkpoints, plan)


def moved_and_not(team: Team, name: str) -> dict[str, Any]:
    """The bits of training with stages that move, and of training without, of what this rank holds in the end."""
    case = CASES[name]
    found: dict[str, Any] = {}
    for moves in (True, False):
        pipe = replannable(case, team)
        average, losses = pipe.ema(0.5), []
        for change in (None, *CHANGES[name]):
            if moves and change is not None:
                move(pipe, plan_of(case, team, **change))
            losses += [pipe.step(case.batch(8, DTYPE)).item().hex() for _ in range(2)]
        losses.append(pipe.evaluate(case.batch(8, DTYPE)).item().hex())
        state = pipe.state_dict()
        entries = {**state["model"], **{f"optimizer {key}": value for key, value in state["optimizer"].items()}}
        entries |= {f"average {key}": value for key, value in average.tensors.items()}
        found["moved" if moves else "kept"] = {
            "losses": losses,
            "norm": pipe.grad_norm,
            "rates": pipe.learning_rates,
            "counts": [pipe.steps, pipe.updates, average.updates],
            "bits": {key: _bits(value) for key, value in entries.items()},
            "stages": sorted(pipe.stage_parameters),
        }
    return found


def _bits(value: Any) -> Any:
    return crc32(value.detach().contiguous().numpy().tobytes()) if isinstance(value, torch.Tensor) else repr(value)
