"""The arguments of ``panpipe.pipeline``, and the checks that need only them."""

from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..backends.kind import BackendKind
from ..core.capture.batch.batch_dims import AUTO as FIND
from ..core.cluster.mesh import Mesh, parse_mesh
from ..core.errors import RequestError
from ..core.offload.request import OffloadRequest, check_offload_request
from ..core.plan.derive import check_agrees
from ..core.plan.plan import Plan, read_plan
from ..core.plan.sharding import AUTO, NONE, check_level
from ..core.schedules.registry import families
from ..core.whole_numbers import whole_number
from .devices.compute import compute_device
from .devices.devices import Names, parse_devices
from .launch.launch import MeshRequest, mesh_for, mesh_in_simulator
from .monitor.monitors import Monitor, monitors_of
from .optimizer.training import Training
from .planning.options import PlanningOptions
from .programs.compiler_choice import Compile, CompilerChoice
from .programs.graphs.supported import check_device, check_plan, check_sharing, refuse_offload
from .watch.timeout import timeout_of
from .weights import ModuleInit

SIMULATOR = "simulator"
TARGETS = ("devices", SIMULATOR)
MICROBATCHES = 8
"""Number of microbatches of an automatic plan by default."""


def given_plan(plan: Plan | str | Path) -> Plan | None:
    """The user's plan; None for an automatic one."""
    if isinstance(plan, Plan):
        return plan
    if not isinstance(plan, str | Path):
        raise RequestError(f"plan is {plan!r}: give 'auto', a Plan, or the path of a plan file")
    if plan in families() and not Path(plan).exists():
        raise RequestError(f"plan is '{plan}', which is the name of a schedule: give schedule='{plan}'")
    return None if plan == "auto" else read_plan(plan)


def given_mesh(mesh: Mesh | DeviceMesh | str | int | None) -> MeshRequest:
    """The user's mesh, of which some dimensions may be unknown until the number of devices is known."""
    if isinstance(mesh, Mesh):
        mesh.check()
    if mesh is None or isinstance(mesh, Mesh | DeviceMesh):
        return mesh
    if not isinstance(mesh, str):
        mesh = f"pp={whole_number('mesh', mesh, 1)}"
    return parse_mesh(mesh, tensor=True)


def _microbatches(given: Any) -> int | None:
    return None if given is None else whole_number("microbatches", given, 1)


def _compiler(compile: str | Compile | None) -> CompilerChoice | None:
    return CompilerChoice.of(compile)


@frozen
class DeviceOptions:
    """The torch device of each device of the pipeline.

    Args:
        names: their names; None for the model's device, or for one GPU each if threads use GPUs.
        share: whether several devices may share a torch device.

    Attributes:
        named: the devices of these names; None without names, and for one GPU each.
    """

    names: Names | None = None
    share: bool = False
    named: tuple[torch.device, ...] | None = field(init=False)

    @named.default
    def _parsed(self) -> tuple[torch.device, ...] | None:
        return None if self.names is None else parse_devices(self.names)

    @property
    def given(self) -> bool:
        """Whether the user gave names."""
        return self.names is not None

    def type_with(self, model: torch.device) -> str:
        """``"cpu"`` or ``"cuda"``, for a model that is on this device."""
        if not self.given:
            return model.type
        return "cuda" if self.named is None else self.named[0].type


@frozen(kw_only=True)
class PipelineOptions:
    """All arguments but model, step and example batch; ``panpipe.pipeline`` documents them.

    Args:
        training: optimizers, and what happens in an update in addition to their steps.
        planning: how an automatic plan is searched.
        devices: the torch devices.
        target: ``"devices"`` or ``"simulator"``.
        microbatches: number of microbatches of a batch; None for that of the plan, or ``MICROBATCHES``.
        plan: ``"auto"``, a Plan, or its file. As an attribute, the plan; None for an automatic one.
        mesh: pipeline × data; None for one pipeline over the ranks there are, or two threads.
        backend: the transport; None for the usual one.
        weights: the source of values for tensors on meta.
        compile: compiles stage programs; None runs operators one by one.
        batch_dims: the dimension of each tensor that has the samples; 0 where it is not given.
        dynamic: the dimensions that vary between batches.
        offload: what leaves the devices between F and the backward; None for what the plan has, and for nothing in an
            automatic one.
        monitors: functions that are called with the numbers of each step.
        timeout_s: seconds without progress that devices wait for each other.
        replan: ``"auto"`` plans again when steps drift; None does not.
        shard: what replicas share; None for what the plan has, and for nothing in an automatic one.
        cuda_graphs: whether stage programs are captured as CUDA graphs.

    Raises:
        RequestError: an argument is invalid, or two of them contradict each other.
    """

    training: Training
    planning: PlanningOptions
    devices: DeviceOptions = DeviceOptions()
    target: str = "devices"
    _microbatches: int | None = field(default=None, converter=_microbatches)
    plan: Plan | None = field(converter=given_plan)
    mesh: MeshRequest = field(default=None, converter=given_mesh)
    backend: str | BackendKind | None = None
    weights: str | Path | ModuleInit | None = None
    compile: CompilerChoice | None = field(default=None, converter=_compiler)
    batch_dims: Any = FIND
    dynamic: Any = None
    offload: OffloadRequest | None = None
    monitors: tuple[Monitor, ...] = field(default=(), converter=monitors_of)
    timeout_s: float = field(default=None, converter=timeout_of)
    replan: str | None = None
    shard: str | None = None
    cuda_graphs: bool = False

    def __attrs_post_init__(self) -> None:
        if self.target not in TARGETS:
            raise RequestError(f"there is no target '{self.target}': known are {', '.join(TARGETS)}")
        if self.replan not in (None, "auto"):
            raise RequestError(f"replan is {self.replan!r}: give 'auto', or None and call pipe.replan()")
        if self.shard is not None:
            check_level(self.shard, AUTO)
        if self.replan is not None and self.simulated:
            raise RequestError(
                f"replan is {self.replan!r}, but simulated devices never drift from the plan: leave replan out"
            )
        shared = self.shard not in (None, NONE) if self.plan is None else any(each != NONE for each in self.plan.shard)
        if shared and self.training.optimizer is None:
            raise RequestError(
                "shard= is given without optimizer=: it divides the optimizer over replicas; give both, or leave shard "
                "out"
            )
        if self.plan is not None:
            check_agrees(
                self.plan, self._microbatches, self.planning.schedule, self.planning.recompute, self._offload_asked(),
                self.shard,
            )  # fmt: skip
            if self.plan.mesh.tensor == 1:  # otherwise the model's DTensors have the mesh, which is compared later
                mesh_for(self.plan, self.mesh)
            if self.planning.boundaries != "operators":
                raise RequestError(
                    f"boundaries is {self.planning.boundaries!r}, but the given plan already has its stages: leave "
                    "boundaries out, or plan again"
                )
        if self.simulated and self.compile is not None:
            raise RequestError(
                f"compile is {self.compile.name!r}, but target 'simulator' takes its times from a cost model: leave "
                "compile out"
            )
        if self.cuda_graphs:
            self._check_graphs()
        if self.simulated and self.mesh is not None:
            mesh_in_simulator(self.mesh)

    def _offload_asked(self) -> bool | None:
        """Whether the given plan has to offload; None if it may do either."""
        if self.offload is None or self.plan is None:
            return None
        check_offload_request(self.offload, len(self.plan.stages))
        return None if self.offload == "auto" else self.offload != "none"

    def _check_graphs(self) -> None:
        if self.simulated:
            raise RequestError(
                "cuda_graphs=True captures what GPUs run, and target 'simulator' has none: leave cuda_graphs out"
            )
        if self.plan is not None:
            check_plan(self.plan)
        if self.offload not in (None, "none"):
            refuse_offload()
        check_sharing([self.shard or NONE])

    @property
    def microbatches(self) -> int:
        """The number of microbatches of a step."""
        return self.plan.microbatches if self.plan is not None else self._microbatches or MICROBATCHES

    @property
    def simulated(self) -> bool:
        """Whether devices are simulated."""
        return self.target == SIMULATOR

    def check(self, model: nn.Module) -> str:
        """Refuse a model that cannot be trained with these options.

        Returns:
            The type of its devices.

        Raises:
            RequestError: it cannot.
        """
        self.training.check(model)
        device_type = self.devices.type_with(compute_device([*model.parameters(), *model.buffers()]))
        if self.simulated and device_type != "cpu":
            raise RequestError(
                f"target 'simulator' runs stages on the CPU, but the model would be on {device_type}: use cpu"
            )
        if self.compile is not None:
            self.compile.check(device_type)
        if self.cuda_graphs:
            check_device(device_type)
        return device_type
