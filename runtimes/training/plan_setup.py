"""What a trainer sets up for one plan: stages with optimizers, prepared steps, and the devices that run them.

Parameters and buffers that the example's step does not use have a stage, too, so that a later step may use them.

A step may choose a part of the model by the batch or by a Python value, such as the head of a task; then the example
uses one of several heads. A part that it does not use is placed where a step that uses it can probably run: tensors are
only sent to later stages, and parts of a model usually run in the order of their definition::

    heads.a  used, stage 1 ──▶ heads.b  unused: stage 1        (the part next to it in the same module)
    body     used, stage 0 ──▶ head     unused: stage 0        (else the last one before it)
"""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from ...backends.kind import BackendKind, dtype_name
from ...backends.registry import known_backends
from ...core.capture.export.captured_step import CapturedStep
from ...core.capture.export.carry_over import Cut, cut_of
from ...core.capture.export.step import capture_step
from ...core.errors import RequestError
from ...core.lowering.queues import sending_pairs
from ...core.plan.plan import Plan
from ..batch.example import Example
from ..batch.shapes import Dims, Shapes
from ..devices.compute import compute_device
from ..engine.prepared import PreparedSteps
from ..engine.step_graphs import StepGraphs
from ..engine.workers import Clock, Workers
from ..launch.team import Team
from ..offload.device_offload import DeviceOffload
from ..offload.offloads import offloads
from ..offload.tier import OffloadTier
from ..programs.compiled import Layout, compile_stages
from ..programs.graphs.graph_pool import check_plan, warn_of_ungraphed
from ..programs.stage_compiler import ProgramOptions, planned_compiler
from ..update.training import Training
from ..update.update import NormParameters
from ..weights.remote_tensors import RemoteTensor, as_meta_tensors
from .evaluation import Evaluator
from .local_stages import LocalStages
from .state import PipelineState


def stages_of_unused(model: nn.Module, step: CapturedStep, cut: Cut) -> dict[str, int]:
    """The stage of each parameter that the step does not use, and of each unused buffer of a module with only such.

    All ranks get the same result. Parameters on meta have no stage, because nothing sets their values.

    Args:
        cut: of that step, into stages.

    Returns:
        Name → stage, for parameters and then buffers.
    """
    used: dict[str, int] = {}
    for index, names in enumerate(cut.parameters):
        for name in names:
            used.setdefault(name, index)
    inside: dict[str, list[tuple[int, int]]] = {}  # module → place and first stage of each used parameter in it
    for place, (name, _) in enumerate(model.named_parameters()):
        for path in _modules_of(name) if name in used else ():
            inside.setdefault(path, []).append((place, used[name]))

    def near(place: int, name: str) -> int:
        """The stage of the last used parameter before one, or else of the first one after it, in the innermost module
        that has any."""
        others = next((inside[path] for path in _modules_of(name) if path in inside), [(0, 0)])
        return others[max(bisect_left(others, (place,)) - 1, 0)][1]

    found = {
        name: near(place, name)
        for place, (name, parameter) in enumerate(model.named_parameters())
        if name not in used and (not parameter.is_meta or isinstance(parameter, RemoteTensor))
    }
    read = {step.buffers[node.name] for node in step.graph.nodes if node.name in step.buffers and node.users}
    for path, module in model.named_modules():
        start = f"{path}." if path else ""
        own = [start + leaf for leaf, _ in module.named_parameters(recurse=False)]
        if own and all(name in found for name in own):
            buffers = [start + leaf for leaf, _ in module.named_buffers(recurse=False)]
            found |= {name: found[own[0]] for name in buffers if name not in read}
    return found


def _modules_of(name: str) -> Iterator[str]:
    """The paths of the modules that contain a parameter, the innermost first; the model's is empty."""
    while name:
        name = name.rpartition(".")[0]
        yield name


@frozen
class PlanSetup:
    """The parts of a trainer that depend on the plan.

    Args:
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
        follow_model: applies changes of the model between steps to the stages.
    """
    model, step, shape, operators = example.model, example.step, example.shape, example.operators
    local = [s.index for s in plan.stages if s.device in team.local]
    device = compute_device([*model.parameters(), *model.buffers()])
    where = team.where = team.where or dict.fromkeys(team.local, device)
    on = {i: where[plan.placement[i]] for i in local}
    compiler, report = planned_compiler(programs.compiler, plan, *programs.plans), programs.report
    first = compile_stages(operators, [stage.nodes for stage in plan.stages], local, on, compiler, programs.known)
    check_transport(team.kind, plan, first.layout, dict(model.named_parameters()), where)
    team.connect(sending_pairs(plan))
    if programs.graphs:
        check_plan(plan.shard, bool(plan.memory.offload))
        warn_of_ungraphed(first)
    kind = next(iter(where.values())).type
    cut = cut_of(first.operators, first.stages)
    unused = stages_of_unused(model, first.operators.step, cut) if not team.tensors.divided else {}
    cut = cut.with_unused(unused, [name for name, _ in model.named_buffers()])
    stages = LocalStages(model, plan, team, first, on, training, unused)

    def captured(batch: Any, _: Any, symbolic: Dims | None) -> CapturedStep:
        with as_meta_tensors(model):
            return capture_step(model, step, batch, device=kind, symbolic=symbolic)

    def shapes(reads: Hashable) -> Shapes:
        return Shapes(captured, team, cut, on, compiler, example.varying, ("training", reads), report)

    prepared = PreparedSteps(model, step, lambda: stages.plan, shapes, stages.states, team.local, follow_model)
    prepared.shapes.keep(shape, first)
    norm_parameters = NormParameters.of(plan, dict(model.named_parameters()), unused)
    copies = offloads(plan, first, team, where, offload or OffloadTier())
    graphs = StepGraphs.on if programs.graphs else None
    workers = Workers(plan, stages.states, team, training, norm_parameters, clock, copies, graphs)
    evaluator = Evaluator(stages, cut, workers, state, programs.compiler, report, follow_model, example.varying)
    return PlanSetup(plan, stages, prepared, workers, evaluator, copies)


def check_transport(
    kind: BackendKind, plan: Plan, layout: Layout, parameters: Mapping[str, Tensor], where: Mapping[int, torch.device]
) -> None:
    """Refuse a plan that would send tensors that its backend cannot move.

    Raises:
        RequestError: the backend does not move a dtype, or tensors on a type of device.
    """
    device = next((device for device in where.values() if device.type not in kind.device_types), None)
    if device is not None:
        types = ", ".join(sorted(kind.device_types))
        raise RequestError(
            f"the model is on {device} and backend '{kind.name}' can only move tensors on {types}: "
            f"{_others(other for other in known_backends().values() if device.type in other.device_types)}"
        )
    for name, dtype in _sent(plan, layout, parameters):
        if kind.dtypes is not None and dtype not in kind.dtypes:
            moved = ", ".join(sorted(map(dtype_name, kind.dtypes)))
            able = (other for other in known_backends().values() if other.dtypes is None or dtype in other.dtypes)
            raise RequestError(
                f"'{name}' goes between devices in {dtype_name(dtype)} and backend '{kind.name}' moves {moved}: "
                f"train in one of those, or {_others(able)}"
            )


def _sent(plan: Plan, layout: Layout, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, torch.dtype]]:
    """Name and dtype of every tensor that is sent between devices."""
    for (sender, reader), tensors in layout.items():
        if plan.placement[sender] != plan.placement[reader]:
            yield from ((tensor.name, tensor.dtype) for tensor in tensors)
    if plan.mesh.data > 1:
        yield from ((name, parameter.dtype) for name, parameter in parameters.items())
    for weight in plan.tied:
        if len({plan.placement[stage] for stage in weight.stages}) > 1:
            yield weight.name, parameters[weight.name].dtype


def _others(kinds: Iterable[BackendKind]) -> str:
    names = [kind.name for kind in kinds if kind.unavailable is None]
    return f"use {' or '.join(names)}" if names else "no backend here does"
