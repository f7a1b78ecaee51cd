"""The plan: the only object that planning and execution share. Its file format is ``panpipe.plan/1``.

Immutable, readable and deterministic: the planner writes plans; the simulator and every runtime read them.
"""

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any

from attrs import field, fields, frozen
from cattrs.gen import make_dict_structure_fn

from ..actions import Action
from ..cluster.cluster import Cluster
from ..cluster.mesh import Mesh
from ..costs.costs import StageCosts, StageEdge
from ..documents import as_plain, converter, from_json, omit_at_default, to_json
from ..files.limits import check_seconds
from ..files.read import read_text
from ..files.write import write_text
from .memory_policy import StageOffload, StageUnshard

FORMAT = "panpipe.plan/1"


@frozen
class Stage:
    """One stage: its device, operators and parameters.

    Args:
        index: position in the pipeline, from 0.
        device: number of its device along the pipeline.
        nodes: its operators, in the graph's order.
        parameters: names of the parameters that its operators read.
    """

    index: int
    device: int
    nodes: tuple[str, ...]
    parameters: tuple[str, ...] = ()


@frozen
class TiedWeight:
    """A parameter that several stages read, each with a copy; its gradient is the sum over the stages, in stage order.

    Args:
        name: the parameter's.
        stages: the stages that read it, in order; at least two.
        bytes: size of its gradient.
    """

    name: str
    stages: tuple[int, ...]
    bytes: int


@frozen
class MemoryPolicy:
    """What the plan does to save memory.

    Args:
        recompute: the stages that recompute their forward, in order.
        offload: the saved tensors that are offloaded, by stage, in order; a stage recomputes or offloads.
        host_copy_queues: in-order queues of each device for copies to and from its host: 1 for both directions, or 2,
            one for each.
        unshard: when the parameters of stages whose replicas share them are whole, by stage, in order.
        within: what backwards compute again of stages that do not recompute: layers, ``every:N``, or ``attention``;
            empty for nothing. Such plans are planned and simulated; they do not train.
    """

    recompute: tuple[int, ...] = ()
    offload: tuple[StageOffload, ...] = ()
    host_copy_queues: int = 1
    unshard: tuple[StageUnshard, ...] = ()
    within: str = ""


@frozen
class Prediction:
    """The predicted step of a plan, with the costs and cluster that it was computed from.

    Args:
        costs: per stage, from the profile.
        cluster: the devices, with their memory and links.
        step_s: time of one training step.
        peak_memory_bytes, peak_saved_bytes: per device along the pipeline: all memory, and saved tensors only.
        bubble_ratio: 1 − the busiest device's compute time ÷ step time.
        evaluations: how many candidate plans were scored.
        interval_s: for costs of the catalogue, from the errors of published runs: the training step is within this
            interval with probability 90 %; None for measured costs.
    """

    costs: tuple[StageCosts, ...]
    cluster: Cluster
    step_s: float
    peak_memory_bytes: tuple[float, ...]
    peak_saved_bytes: tuple[float, ...]
    bubble_ratio: float
    evaluations: int = 1
    interval_s: tuple[float, float] | None = None


@frozen(slots=False, repr=False)
class Plan:
    """A partition of the model into stages, their devices, and the compute order of each device.

    Args:
        model: the model's name, for display.
        graph_hash: hash of the operator graph that the stages partition.
        mesh: pipeline × data × tensor.
        microbatches: number per step.
        schedule: name of the schedule that gave the order, with its parameters.
        stages: in order.
        edges: the messages between stages.
        device_actions: per device the compute order: F, I, W and B only.
        tied: parameters that more than one stage reads.
        memory: the memory policy.
        sync: whether optimizer steps wait for all stages: for the global gradient norm, or for a gradient scaler's
            overflow check.
        prediction: of this plan; not part of its hash.
        forward_only: whether its orders hold F only: no saved tensors, reductions or optimizer steps.
        shard: per stage what its replicas share (see ``policies/sharding.py``); empty if they share nothing.
    """

    model: str
    graph_hash: str
    mesh: Mesh
    microbatches: int
    schedule: str
    stages: tuple[Stage, ...]
    edges: tuple[StageEdge, ...]
    device_actions: tuple[tuple[Action, ...], ...]
    tied: tuple[TiedWeight, ...] = ()
    memory: MemoryPolicy = field(factory=MemoryPolicy)
    prediction: Prediction | None = None
    sync: bool = False
    forward_only: bool = False
    shard: tuple[str, ...] = ()

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the plan without its prediction."""
        identity = as_plain(self)
        del identity["prediction"]
        return hashlib.sha256(json.dumps(identity, separators=(",", ":")).encode()).hexdigest()

    def __repr__(self) -> str:
        """A summary; `plan_json` writes the whole plan."""
        predicted = "no prediction"
        if self.prediction is not None:
            peak = max(self.prediction.peak_memory_bytes, default=0.0)
            predicted = (
                f"predicted: {self.prediction.step_s:.4g} s a step, {peak / 2**20:.4g} MiB on the fullest device"
            )
        replicas = f" × {self.mesh.data} replicas" if self.mesh.data > 1 else ""
        return (
            f"<Plan of {self.model}: {self.schedule}, {len(self.stages)} stages on {self.devices} devices{replicas}, "
            f"{self.microbatches} microbatches; {predicted}>"
        )

    @property
    def devices(self) -> int:
        """Devices along the pipeline."""
        return self.mesh.pipeline

    @property
    def predicted(self) -> Prediction:
        """The prediction, which every plan of the planner has.

        Raises:
            ValueError: the plan has none.
        """
        if self.prediction is None:
            raise ValueError(f"this plan of {self.model} has no prediction: simulate it, or plan again")
        return self.prediction

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """Device of every stage."""
        return tuple(stage.device for stage in self.stages)

    @cached_property
    def offloaded_bytes(self) -> dict[int, int]:
        """Bytes of one microbatch that are offloaded, of every stage that offloads."""
        return {each.stage: each.bytes for each in self.memory.offload}

    def save(self, path: str | Path) -> None:
        """Write the plan as a file that `load`, ``panpipe.pipeline(plan=...)`` and the command line read.

        Raises:
            RequestError: the file cannot be written.
        """
        write_text(path, plan_json(self))

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan file.

        Raises:
            RequestError: the file cannot be read, or is not a plan of this version.
        """
        return read_plan(path)

    def stages_on(self, device: int) -> tuple[Stage, ...]:
        """The stages that a device holds, in order."""
        return tuple(stage for stage in self.stages if stage.device == device)


omit_at_default(MemoryPolicy, "host_copy_queues", "unshard", "within")
omit_at_default(Prediction, "interval_s")
_structured = make_dict_structure_fn(Prediction, converter, _cattrs_forbid_extra_keys=True)
_FORMER = ("reference_s", "rehearsed_s")
"""Fields of older files, with readings of the machine's speed; they are not read."""


def _prediction(data: Any, kind: type[Prediction]) -> Prediction:
    known = {name: value for name, value in data.items() if name not in _FORMER} if isinstance(data, dict) else data
    return _structured(known, kind)


converter.register_structure_hook(Prediction, _prediction)
omit_at_default(Mesh, "tensor", "sharing", "context", "experts")
omit_at_default(Plan, "sync", "forward_only", "shard")


def plan_json(plan: Plan) -> str:
    """The plan document: the same plan gives the same bytes."""
    return to_json(FORMAT, plan)


def parse_plan(text: str, origin: str) -> Plan:
    """Read a plan document; ``origin`` names it in errors. The result is well formed but not validated.

    Raises:
        RequestError: it is truncated, of another format or version, or a field is missing, unknown or wrong, such as a
            cost above a year.
    """
    plan = from_json(text, FORMAT, Plan, origin)
    check_possible_times(plan, origin)
    return plan


def check_possible_times(plan: Plan, origin: str) -> None:
    """Raise a RequestError if a time among a plan's costs is negative or above a year; ``origin`` names its file."""
    costs = () if plan.prediction is None else plan.prediction.costs
    for stage, cost in enumerate(costs):
        for name in (each.name for each in fields(StageCosts) if each.name.endswith("_s")):
            value = getattr(cost, name)
            if value is not None:
                check_seconds(f"{origin} is not possible: {name} of stage {stage}", value)


def read_plan(path: str | Path) -> Plan:
    """Read a plan file. Raises RequestError if it is not one."""
    return parse_plan(read_text(path), str(path))
