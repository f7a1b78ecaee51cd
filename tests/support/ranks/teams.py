"""Pipelines of cases on devices that are there already: threads of a test, or ranks that it started."""

from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve
from panpipe.core.lowering.derive import synchronised
from panpipe.core.plan.plan import Plan
from panpipe.runtimes.batch.example import Example
from panpipe.runtimes.engine.workers import Clock
from panpipe.runtimes.launch.team import Team
from panpipe.runtimes.microbatches import split_batch
from panpipe.runtimes.monitor.monitors import Monitor
from panpipe.runtimes.offload.tier import OffloadTier
from panpipe.runtimes.pipeline import Pipeline
from panpipe.runtimes.programs.compiled import compile_stages
from panpipe.runtimes.programs.stage_compiler import ProgramOptions
from panpipe.runtimes.session import Session
from panpipe.runtimes.trainer import Trainer
from panpipe.runtimes.training.agreement import compare_initial_weights
from panpipe.runtimes.update.optimizers import OptimizerFactory
from panpipe.runtimes.update.training import Training
from panpipe.runtimes.weights import weights_from
from torch import nn

from ..cuts import batch_on, captured_once, dims_once, even_plan, programs_of
from ..models import Case
from ..sharing import shared

SEED = 3


def pipeline_on(
    team: Team,
    case: Case,
    rows: int,
    microbatches: int,
    optimizer: OptimizerFactory,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    plan: Plan | None = None,
    plan_options: dict[str, Any] | None = None,
    model: nn.Module | None = None,
    training: Training | None = None,
    clock: Clock | None = None,
    offload: OffloadTier | None = None,
    seed: int = SEED,
    monitors: Sequence[Monitor] = (),
    shard: str = "none",
    **options: Any,
) -> Pipeline:
    """A pipeline that is ready to train.

    Args:
        team: its devices.
        case: what is trained.
        rows: samples of a replica's batch.
        microbatches: into how many they are cut.
        optimizer: of each stage.
        dtype: of the parameters.
        device: where the stages are.
        plan: an even one, over the team's mesh, by default.
        plan_options: of the even plan.
        model: the case's own by default.
        training: how it is trained.
        clock: of simulated devices.
        offload: where saved tensors go that leave.
        seed: of all random numbers.
        monitors: called after each step.
        shard: what replicas share.
        options: of ``ProgramOptions``.
    """
    operators = captured_once(case, dtype, rows, microbatches, device)
    if plan is None:
        plan = evolve(even_plan(operators, team.size, microbatches, **(plan_options or {})), mesh=team.mesh)
    plan = plan if shard == "none" else shared(plan, shard)
    training = evolve(training or Training(), optimizer=optimizer, seed=seed)
    if training.needs_all_stages:
        plan = synchronised(plan)
    model = model or case.model(dtype).to(device)
    training.check(model)
    batch = batch_on(case, rows, dtype, device)
    piece = split_batch(batch, microbatches, dims_once(case, dtype, rows, device))[0]
    example = Example(model, case.step, piece, operators)
    if options.get("compiler") is None and "known" not in options:
        options["known"] = programs_of(case, dtype, rows, microbatches, device)
    pipe = Pipeline(
        Session(Trainer(example, plan, team, training, ProgramOptions(**options), clock, offload, monitors))
    )
    source = weights_from(None, model, seed)
    pipe._session.load(source, compare_initial_weights(team, model, source))
    return pipe


def prepare(case: Case, dtype: torch.dtype, rows: int, microbatches: int, devices: int, **plan_options: Any) -> None:
    """Capture a case, and derive the programs of an even plan, which forks of this process then have."""
    operators = captured_once(case, dtype, rows, microbatches)
    stages = [stage.nodes for stage in even_plan(operators, devices, microbatches, **plan_options).stages]
    where = dict.fromkeys(range(len(stages)), torch.device("cpu"))
    compile_stages(operators, stages, where, where, known=programs_of(case, dtype, rows, microbatches, "cpu"))
