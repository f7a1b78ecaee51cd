"""The arguments of ``panpipe.pipeline``, and the checks that need only them."""

from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..backends.kind import BackendKind
from ..core.arguments import whole_number
from ..core.capture.batch.batch_dims import AUTO as FIND
from ..core.cluster.mesh import DATA, PIPELINE, TENSOR, Mesh, parse_mesh, plain
from ..core.errors import RequestError
from ..core.lowering.derive import check_agrees
from ..core.offload.request import check_offload_request
from ..core.plan.plan import Plan, read_plan
from ..core.policies.sharding import NONE
from .devices.compute import compute_device
from .devices.devices import Names, parse_devices
from .launch.launch import MeshRequest, mesh_for, mesh_in_simulator, refuse_planned_only
from .programs.graphs.graph_pool import check_device, check_plan
from .settings import AUTO, Auto, Memory, PlanningOptions, Run
from .update.training import Training

SIMULATOR = "simulator"
MICROBATCHES = 8
"""Number of microbatches of an automatic plan by default."""


def given_plan(plan: Plan | Auto | str | Path) -> tuple[Plan | None, Auto]:
    """The user's plan, None for an automatic one; and how an automatic one is found."""
    if isinstance(plan, Plan):
        return plan, Auto()
    if isinstance(plan, Auto):
        return None, plan
    if not isinstance(plan, str | Path):
        raise RequestError(
            f"plan is {plan!r}: give 'auto', the name of a schedule, a panpipe.Auto, a Plan, or the path of a plan file"
        )
    if isinstance(plan, str) and (plan == AUTO or not (Path(plan).suffix or Path(plan).exists())):
        return None, Auto(schedule=plan)
    return read_plan(plan), Auto()


def given_mesh(mesh: Mesh | DeviceMesh | str | int | None) -> MeshRequest:
    """The user's mesh, of which some dimensions may be unknown until the number of devices is known."""
    if isinstance(mesh, Mesh):
        mesh.check()
    if isinstance(mesh, DeviceMesh):
        return mesh_from_torch(mesh)
    if mesh is None or isinstance(mesh, Mesh):
        return mesh
    if not isinstance(mesh, str):
        mesh = f"pp={whole_number('mesh', mesh, 1)}"
    return parse_mesh(mesh, tensor=True)


def mesh_from_torch(found: DeviceMesh) -> MeshRequest:
    """The mesh of a ``DeviceMesh``, whose dimensions are named ``pp``, ``dp`` or ``tp``; of the first two one may be
    missing. With tensor ranks, which the model's DTensors have, their groups are not read.

    Raises:
        RequestError: it has other dimensions.
    """
    names, table, shape = list(found.mesh_dim_names or ()), found.mesh, tuple(found.mesh.shape)
    if TENSOR in names:
        return parse_mesh(",".join(f"{name}={size}" for name, size in zip(names, shape, strict=True)), tensor=True)
    for missing in (PIPELINE, DATA):
        if len(names) == 1 and missing not in names:
            names, table = [*names, missing], table.unsqueeze(-1)
    if sorted(names) != sorted((PIPELINE, DATA)):
        raise RequestError(
            f"the device mesh is {' × '.join(map(str, shape))} with dimensions {', '.join(names) or 'without names'}: "
            "name them pp, along the pipeline, and dp, its replicas"
        )
    replicas = table if names[0] == DATA else table.T
    return plain(Mesh(replicas.shape[1], replicas.shape[0], tuple(map(tuple, replicas.tolist()))))


def _microbatches(given: Any) -> int | None:
    return None if given is None else whole_number("microbatches", given, 1)


@frozen(kw_only=True)
class PipelineOptions:
    """All arguments but model, step and example batch; ``panpipe.pipeline`` documents them.

    Args:
        training: optimizers, and what happens in an update in addition to their steps.
        planning: how an automatic plan is searched, and the memory of the devices.
        run: how the pipeline starts and runs.
        devices: names of the torch device of each device of the pipeline; None for the model's device, or for one GPU
            each if threads use GPUs.
        microbatches: number of microbatches of a batch; None for that of the plan, or ``MICROBATCHES``.
        plan: the plan; None for an automatic one.
        mesh: pipeline × data; None for one pipeline over the ranks there are, or two threads.
        backend: the transport; ``"simulator"`` for simulated devices; None for the usual one.
        batch_dims: the dimension of each tensor that has the samples; 0 where it is not given.
        dynamic: the dimensions that vary between batches.

    Attributes:
        named: the devices of these names; None without names, and for one GPU each.

    Raises:
        RequestError: an argument is invalid, or two of them contradict each other.
    """

    training: Training
    planning: PlanningOptions
    run: Run = field(factory=Run)
    devices: Names | None = None
    _microbatches: int | None = field(default=None, converter=_microbatches)
    plan: Plan | None = None
    mesh: MeshRequest = field(default=None, converter=given_mesh)
    backend: str | BackendKind | None = None
    batch_dims: Any = FIND
    dynamic: Any = None
    named: tuple[torch.device, ...] | None = field(init=False)

    @named.default
    def _parsed(self) -> tuple[torch.device, ...] | None:
        return None if self.devices is None else parse_devices(self.devices)

    def __attrs_post_init__(self) -> None:
        planning, shard, compiler = self.planning, self.memory.shard, self.run.compiler
        if self.run.replan is not None and self.simulated:
            raise RequestError(
                f"replan is {self.run.replan!r}, but simulated devices never drift from the plan: leave replan out"
            )
        shared = shard not in (None, NONE) if self.plan is None else any(each != NONE for each in self.plan.shard)
        if shared and self.training.optimizer is None:
            raise RequestError(
                "Memory(shard=) is given without optimizer=: it divides the optimizer over replicas; give both, or "
                "leave shard out"
            )
        if self.plan is not None:
            refuse_planned_only(self.plan)
            check_agrees(
                self.plan, self._microbatches, AUTO, planning.memory.recompute, self._offload_asked(), shard,
            )  # fmt: skip
            self._check_limit(self.plan)
            if self.plan.mesh.tensor == 1:  # otherwise the model's DTensors have the mesh, which is compared later
                mesh_for(self.plan, self.mesh)
        if self.simulated and compiler is not None:
            raise RequestError(
                f"compile is {compiler.name!r}, but backend 'simulator' takes its times from a cost model: leave "
                "compile out"
            )
        if self.run.cuda_graphs:
            self._check_graphs()
        if self.simulated and self.mesh is not None:
            mesh_in_simulator(self.mesh)

    @property
    def memory(self) -> Memory:
        """What the devices may hold, and what leaves them."""
        return self.planning.memory

    def _offload_asked(self) -> bool | None:
        """Whether the given plan has to offload; None if it may do either."""
        offload = self.memory.offload
        if offload is None or self.plan is None:
            return None
        check_offload_request(offload, len(self.plan.stages))
        return None if offload == "auto" else offload != "none"

    def _check_limit(self, plan: Plan) -> None:
        limit = self.memory.limit
        if limit is None:
            return
        peak = None if plan.prediction is None else max(plan.predicted.peak_memory_bytes)
        if peak is None or peak > limit:
            has = "has no prediction of its memory" if peak is None else f"holds {peak / 1e9:.4g} GB on a device"
            raise RequestError(
                f"limit is {limit / 1e9:.4g} GB, and the given plan {has}: plan again with this limit, or leave it out"
            )

    def _check_graphs(self) -> None:
        if self.simulated:
            raise RequestError(
                "cuda_graphs=True captures what GPUs run, and backend 'simulator' has none: leave cuda_graphs out"
            )
        levels, offload = [self.planning.shard], self.memory.offload not in (None, "none")
        if self.plan is not None:
            levels, offload = [*levels, *self.plan.shard], offload or bool(self.plan.memory.offload)
        check_plan(levels, offload)

    @property
    def microbatches(self) -> int:
        """The number of microbatches of a step."""
        return self.plan.microbatches if self.plan is not None else self._microbatches or MICROBATCHES

    @property
    def simulated(self) -> bool:
        """Whether devices are simulated."""
        return self.backend == SIMULATOR

    def check(self, model: nn.Module) -> str:
        """Refuse a model that cannot be trained with these options.

        Returns:
            The type of its devices.

        Raises:
            RequestError: it cannot.
        """
        self.training.check(model)
        device_type = compute_device([*model.parameters(), *model.buffers()]).type
        if self.devices is not None:
            device_type = "cuda" if self.named is None else self.named[0].type
        if self.simulated and device_type != "cpu":
            raise RequestError(
                f"backend 'simulator' runs stages on the CPU, but the model would be on {device_type}: use cpu"
            )
        if self.run.compiler is not None:
            self.run.compiler.check(device_type)
        if self.run.cuda_graphs:
            check_device(device_type)
        return device_type
