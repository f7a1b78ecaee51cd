"""Which process holds which parameter: its own stages' alone, the user's own tensors, under their own names."""

from collections.abc import Mapping

import torch
from torch import nn

from ..core.capture.programs import StagePrograms
from ..core.errors import RequestError
from ..core.plan import Plan
from .compute import compute_device
from .team import Team


def own_parameters(
    model: nn.Module, plan: Plan, programs: Mapping[int, StagePrograms], team: Team
) -> dict[int, dict[str, nn.Parameter]]:
    """Give each local stage its parameters.

    The first local stage that reads a parameter gets the user's tensor; a further one gets a replica. Replicas of a
    tied weight start equal everywhere: from the first stage's.

    Args:
        model: the user's module.
        plan: the plan.
        programs: of the local stages.
        team: the devices.

    Returns:
        Stage index → name → parameter.

    Raises:
        RequestError: a parameter that this process needs has no data.
    """
    parameters = dict(model.named_parameters())
    own: dict[int, dict[str, nn.Parameter]] = {}
    used: set[str] = set()
    for index, stage in sorted(programs.items()):
        own[index] = {}
        for name in stage.inputs.parameters:
            if parameters[name].is_meta:
                raise RequestError(
                    f"parameter '{name}' is on the meta device and has no data: "
                    "materialise it before building the pipeline"
                )
            tensor = parameters[name]
            own[index][name] = nn.Parameter(tensor.detach().clone(), tensor.requires_grad) if name in used else tensor
            used.add(name)
    _equal_replicas(plan, own, team)
    return own


def release_others(model: nn.Module, programs: Mapping[int, StagePrograms], written: frozenset[str]) -> None:
    """Put what other processes own on the meta device.

    Args:
        model: the user's module; parameters that no local stage reads are replaced by meta ones.
        programs: of the local stages.
        written: buffers that the step writes; those that another process writes would go stale here.
    """
    used = {name for stage in programs.values() for name in stage.inputs.parameters}
    here = {name for stage in programs.values() for name in stage.inputs.buffers}
    _drop_others(model, used, written - here)


def _equal_replicas(plan: Plan, own: dict[int, dict[str, nn.Parameter]], team: Team) -> None:
    mine = {name: (tuple(p.shape), p.dtype) for stage in own.values() for name, p in stage.items()}
    shapes = {name: shape for found in team.everywhere(lambda _: mine) for name, shape in found.items()}

    where = compute_device(p for stage in own.values() for p in stage.values())

    def work(device: int) -> None:
        backend = team.backend(device)
        for weight in plan.tied:
            holders = [stage for stage in weight.stages if plan.placement[stage] == device]
            first = plan.placement[weight.stages[0]]
            shape, dtype = shapes[weight.name]
            value = own[holders[0]][weight.name].detach() if holders else torch.empty(shape, dtype=dtype, device=where)
            backend.broadcast(value, first)
            for stage in holders:
                own[stage][weight.name].detach().copy_(value)

    team.run_local(work)


def _drop_others(model: nn.Module, used: set[str], stale: frozenset[str]) -> None:
    kept = {id(p) for name, p in model.named_parameters() if name in used}
    dropped: dict[int, nn.Parameter] = {}  # a tied weight stays one tensor under all its names
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in kept and not parameter.is_meta:
                meta = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
                module._parameters[name] = dropped.setdefault(id(parameter), meta)
    for name in stale:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        module._buffers[leaf] = model.get_buffer(name).to("meta")
