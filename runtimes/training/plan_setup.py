"""What a trainer sets up for one plan: stages with optimizers, prepared steps, and the devices that run them."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from attrs import frozen

from ...core.capture.export.captured_step import CapturedStep
from ...core.capture.export.carry_over import cut_of
from ...core.capture.export.step import capture_step
from ...core.plan.message_matching import sending_pairs
from ...core.plan.plan import Plan
from ..batch.example import Example
from ..batch.shapes import Shapes
from ..batch.varying_sizes import Dims
from ..devices.compute import compute_device
from ..engine.clocked import Clock
from ..engine.prepared import PreparedSteps
from ..engine.transport import check_transport
from ..engine.workers import Workers
from ..launch.team import Team
from ..offload.device_offload import DeviceOffload
from ..offload.offloads import offloads
from ..offload.tier import OffloadTier
from ..optimizer.clipping import NormParameters
from ..optimizer.training import Training
from ..programs.compiled import compile_stages
from ..programs.graphs.supported import check_plan, warn_of_ungraphed
from ..programs.options import ProgramOptions
from ..programs.planned_compiler import PlannedCompiler
from ..weights.remote_tensors import as_meta_tensors
from .evaluation import Evaluator
from .local_stages import LocalStages
from .state import PipelineState
from .unused_tensors import stages_of_unused


@frozen
class PlanSetup:
    """The parts of a trainer that depend on the plan.

    Args:
        plan: the plan.
        stages: parameters, buffers and optimizers of the stages in this process.
        prepared: the prepared steps.
        workers: the devices of this process.
        evaluator: runs forwards.
        offloads: device of this process → its copies of saved tensors to the host.
    """

    plan: Plan
    stages: LocalStages
    prepared: PreparedSteps
    workers: Workers
    evaluator: Evaluator
    offloads: Mapping[int, DeviceOffload]


def set_up_plan(
    example: Example,
    plan: Plan,
    team: Team,
    training: Training,
    state: PipelineState,
    programs: ProgramOptions,
    follow_model: Callable[[], None],
    clock: Clock | None = None,
    offload: OffloadTier | None = None,
) -> PlanSetup:
    """Create the parts for a plan; its parameters have no values yet.

    Args:
        example: the user's model and step, captured for the largest microbatch; the microbatch is not kept.
        plan: a valid plan, with SYNC if ``training`` needs all stages at once.
        team: the devices.
        training: optimizer, clipping, scaling and seed.
        state: of the pipeline.
        programs: how stage programs are derived.
        follow_model: applies changes of the model between steps to the stages.
        clock: runs virtual devices; None for real ones.
        offload: where offloaded saved tensors go; None for the host's memory.
    """
    model, step, shape, operators = example.model, example.step, example.shape, example.operators
    local = [s.index for s in plan.stages if s.device in team.local]
    device = compute_device([*model.parameters(), *model.buffers()])
    where = team.where = team.where or dict.fromkeys(team.local, device)
    on = {i: where[plan.placement[i]] for i in local}
    compiler, report = PlannedCompiler.of(programs.compiler, plan, *programs.plans), programs.report
    first = compile_stages(operators, [stage.nodes for stage in plan.stages], local, on, compiler, programs.known)
    check_transport(team.kind, plan, first.layout, dict(model.named_parameters()), where)
    team.connect(sending_pairs(plan))
    if programs.graphs:
        check_plan(plan)
        warn_of_ungraphed(first)
    kind = next(iter(where.values())).type
    cut = cut_of(first.operators, first.stages)
    unused = stages_of_unused(model, first.operators.step, cut) if team.tensor is None else {}
    cut = cut.with_unused(unused, [name for name, _ in model.named_buffers()])
    stages = LocalStages(model, plan, team, first, on, training, unused)

    def captured(batch: Any, _: Any, symbolic: Dims | None) -> CapturedStep:
        with as_meta_tensors(model):
            return capture_step(model, step, batch, device=kind, symbolic=symbolic)

    def shapes(reads: Hashable) -> Shapes:
        return Shapes(captured, team, cut, on, compiler, example.varying, ("training", reads), report)

    prepared = PreparedSteps(model, step, lambda: stages.plan, shapes, stages.states, team.local, follow_model)
    prepared.shapes.keep(shape, first, example.symbolic)
    norm_parameters = NormParameters.of(plan, dict(model.named_parameters()), unused)
    copies = offloads(plan, first, team, where, offload or OffloadTier())
    workers = Workers(plan, stages.states, team, where, training, norm_parameters, clock, copies, programs.graphs)
    evaluator = Evaluator(stages, cut, workers, state, programs, follow_model, example.varying)
    return PlanSetup(plan, stages, prepared, workers, evaluator, copies)
