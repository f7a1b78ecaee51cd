"""Checks that the arguments of ``panpipe.pipeline`` fit a model with or without DTensor parameters."""

from attrs import evolve
from torch import nn

from ...core.capture.regions.breaks import StepFunction
from ...core.cluster.mesh import MeshShape
from ...core.errors import RequestError
from ...core.policies.sharding import NONE, OPTIMIZER
from ..launch.rank_tensors import WHOLE, RankTensors
from ..options import PipelineOptions
from .tensor_ranks import TensorRanks


def tensors_of(model: nn.Module, step: StepFunction, options: PipelineOptions) -> RankTensors:
    """What this rank has of a model's tensors: parts if they are DTensors.

    Raises:
        RequestError: their layouts are not supported, or an argument does not fit.
    """
    found = TensorRanks.of(model, step)
    check_tensor_options(options, found)
    return WHOLE if found is None else with_replicas(found, options)


def with_replicas(tensor: TensorRanks, options: PipelineOptions) -> TensorRanks:
    """The tensor ranks with the replicas (dp) of the user's mesh or plan."""
    mesh, plan = options.mesh, options.plan
    if isinstance(mesh, MeshShape):
        return evolve(tensor, data=mesh.data or 1, pipeline_last=mesh.pipeline_last)
    if plan is not None and plan.mesh.tensor > 1:
        return evolve(tensor, data=plan.mesh.data)
    return tensor


def check_tensor_options(options: PipelineOptions, tensor: TensorRanks | None) -> None:
    """Refuse arguments that need tensor ranks where the model has none, and those that tensor ranks do not support.

    Args:
        tensor: the tensor ranks of the model; None for one without DTensors.

    Raises:
        RequestError: one of them.
    """
    mesh, plan = options.mesh, options.plan
    if tensor is None:
        asked = mesh.tensor if isinstance(mesh, MeshShape) else None
        asked = plan.mesh.tensor if plan is not None and plan.mesh.tensor > 1 else asked
        if asked is not None and asked > 1:
            raise RequestError(
                f"{'the plan' if plan is not None else 'mesh'} has {asked} tensor ranks at each position and the model "
                "has no DTensor parameters: apply parallelize_module to it over as many ranks, or leave "
                "tp out of the mesh"
            )
        return
    if options.simulated:
        tensor.refuse("backend is 'simulator'")
    if options.devices is not None:
        tensor.refuse("devices is given")
    if options.planning.shard != NONE and plan is None:
        tensor.refuse(f"shard is {options.planning.shard!r} and no plan is given")
    levels = () if plan is None else plan.shard
    level = next((level for level in levels if level not in (NONE, OPTIMIZER)), None)
    if level is not None:
        tensor.refuse(f"the plan has shard '{level}'")
    for name, value in (
        ("weights", options.run.weights), ("compile", options.run.compile), ("replan", options.run.replan),
        ("cuda_graphs", options.run.cuda_graphs or None),
    ):  # fmt: skip
        if value is not None:
            tensor.refuse(f"{name} is given")
    elsewhere = next((n for n, p in tensor.parts.named_parameters() if p.device.type != "cpu"), None)
    if elsewhere is not None:
        tensor.refuse(f"'{elsewhere}' is on {tensor.parts.get_parameter(elsewhere).device.type}, and not on the CPU")
