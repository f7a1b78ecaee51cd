"""The answer of ``panpipe plan``, as text and as plain data."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from attrs import frozen

from ...core import ratios
from ...core.costs.costs import StageCosts
from ...core.costs.module_names import module_ranges
from ...core.documents import as_plain
from ...core.plan.plan import Plan, Prediction
from ...core.plan.wording import plan_size
from ...core.policies.sharding import SHARED
from ...core.schedules.meaning import meaning_of, short_name
from ...core.timing.idle import IdleTime, idle_data
from ...core.trace.throughput import StepTotals, Throughput, throughput
from ...core.validation.interval import interval_text
from ...core.wording import counted, signed_percent
from ..output import bytes_text, print_records, seconds_text, share_text, wide
from ..step_tables import idle_of, print_devices, print_idle

if TYPE_CHECKING:
    from ...simulators.result import SimulationResult


NOTICEABLE = 1e-3
"""The simulator's step is also printed if it differs by more than this share from the predicted one."""


@frozen(slots=False)
class PlanAnswer:
    """A plan with the facts to print.

    Args:
        limits: bytes that each device may use.
        work: samples, tokens and FLOPs of a step.
        unlimited_s: the step with the best schedule without a memory limit, if known.
        peak_flop_per_s: peak rate of every device; None if one is unknown.
        others: slower plans with a lower peak of their fullest device, the fastest first.
        fewer: a faster plan for fewer of the devices, if one is known.
    """

    plan: Plan
    limits: Sequence[float]
    work: StepTotals
    unlimited_s: float | None = None
    peak_flop_per_s: Sequence[float] | None = None
    others: Sequence[Plan] = ()
    fewer: Plan | None = None

    @property
    def prediction(self) -> Prediction:
        return self.plan.predicted

    @cached_property
    def run(self) -> "SimulationResult":
        """The simulated step of the plan."""
        from ...simulators.oracle import simulated_step

        return simulated_step(self.plan)

    @cached_property
    def idle(self) -> IdleTime:
        return idle_of(self.run, self.unlimited_s)

    @property
    def rates(self) -> Throughput:
        return throughput(self.prediction.step_s, self.work, self.peak_flop_per_s)

    def plain(self) -> dict[str, Any]:
        """The data that ``--json`` prints: everything needed to evaluate the plan again, and the explanation."""
        fewer = self.fewer
        return {
            **plain_plan(self.plan),
            "simulated_step_s": self.run.step_s,
            "simulated_peak_memory_bytes": list(self.run.peak_memory_bytes),
            "memory_limit_bytes": list(self.limits),
            "memory_at_peak_bytes": list(self.run.memory_at_peak),
            "throughput": as_plain(self.rates),
            "idle": idle_data(self.idle),
            "runners_up": [plain_plan(other) for other in self.others],
            "fewer_devices": None if fewer is None else {
                "devices": fewer.devices, "step_s": fewer.predicted.step_s, "schedule": fewer.schedule,
            },
        }  # fmt: skip

    def show(self) -> None:
        """Print the answer as text."""
        plan, prediction = self.plan, self.prediction
        print(f"{plan.model or 'the graph'}: {plan_size(plan)}, {short_name(plan.schedule)}")
        tried = f", {counted(prediction.evaluations, 'plan')} evaluated" if prediction.evaluations else ""
        step = f"{seconds_text(prediction.step_s)}{interval_text(prediction)}"
        print(f"Step {step}, efficiency {efficiency(plan):.1%}{tried}")
        if (meaning := meaning_of(plan.schedule)) is not None:
            print(f"{short_name(plan.schedule)}: {meaning}")
        if (advice := data_parallel_advice(plan, self.limits)) is not None:
            print(advice)
        if self.fewer is not None:
            fewer, step = self.fewer.devices, seconds_text(self.fewer.predicted.step_s)
            print(
                f"{fewer} of the {plan.devices} devices alone are faster: {step} a step; plan for a cluster of {fewer}"
            )
        rates = _rates_text(self.rates)
        if rates:
            print(rates)
        if plan.memory.offload:
            print(_offload_text(plan))
        if plan.memory.within:
            print(f"Recomputed within stages: {plan.memory.within}; training does not execute this")
        if plan.shard:
            print(_shard_text(plan))
        if plan.mesh.width > 1:
            kinds = (plan.mesh.tensor, "tensor"), (plan.mesh.context, "context"), (plan.mesh.experts, "expert")
            ranks = " × ".join(f"{count} {kind}" for count, kind in kinds if count > 1)
            print(f"Exchanges of {ranks} ranks: {reduction_share(plan):.1%} of the time of F, B, I and W")
        self._show_stages()
        self._show_devices()
        if abs(self.run.step_s - prediction.step_s) > NOTICEABLE * prediction.step_s:
            print(
                f"\nIn the simulator, where transfers share links, the step takes {seconds_text(self.run.step_s)}; "
                "the next table explains that step"
            )
        print_idle(self.idle)
        if self.others:
            self._show_others()

    def _show_others(self) -> None:
        best_s, least = self.prediction.step_s, _fullest(self.plan)
        print_records(
            "The fastest plan, and slower ones with less memory", list(enumerate((self.plan, *self.others), start=1)),
            {"plan": lambda each: str(each[0]), "schedule": lambda each: short_name(each[1].schedule),
             "stages": lambda each: len(each[1].stages),
             "step": lambda each: seconds_text(each[1].predicted.step_s),
             "slower": lambda each: signed_percent(each[1].predicted.step_s / best_s - 1) if best_s else "–",
             "fullest device": lambda each: bytes_text(_fullest(each[1])),
             "memory": lambda each: signed_percent(_fullest(each[1]) / least - 1)}, texts=("schedule",),
        )  # fmt: skip

    def _show_stages(self) -> None:
        costs, received = self.prediction.costs, [0] * len(self.plan.stages)
        for edge in self.plan.edges:
            received[edge.dst] += edge.bytes
        modules = module_ranges([stage.nodes for stage in self.plan.stages])
        columns: dict[str, str | Callable[[Any], object]] = {
            "stage": lambda stage: str(stage.index),
            "on": "device",
            "modules": lambda stage: modules[stage.index],
            "F + B": lambda stage: seconds_text(compute_s(costs[stage.index])),
            "saved": lambda stage: bytes_text(costs[stage.index].saved_bytes),
        }
        if wide():  # a narrow terminal has the modules' names instead
            columns["reads"] = lambda stage: bytes_text(received[stage.index])
            columns["parameters"] = lambda stage: bytes_text(costs[stage.index].parameter_bytes)
        title = f"Stages ({'F + B, saved and reads' if wide() else 'F + B and saved'} for each microbatch)"
        print_records(title, self.plan.stages, columns, texts=("modules",))

    def _show_devices(self) -> None:
        plan, costs = self.plan, self.prediction.costs
        names = [self.prediction.cluster.devices[number].name for number in plan.mesh.cluster_devices]

        def busy(device: int) -> str:
            own = plan.microbatches * sum(compute_s(costs[stage.index]) for stage in plan.stages_on(device))
            return share_text(own, self.prediction.step_s)

        print_devices(
            self.run, self.limits,
            {"device": lambda d: f"{d} {names[d]}",
             "stages": lambda d: " ".join(str(stage.index) for stage in plan.stages_on(d)), "busy": busy},
        )  # fmt: skip


def _fullest(plan: Plan) -> float:
    return max(plan.predicted.peak_memory_bytes)


def data_parallel_advice(plan: Plan, limits: Sequence[float]) -> str | None:
    """The advice to use data parallelism; None where a device cannot hold the whole model."""
    devices = plan.devices * plan.mesh.data
    if plan.devices == 1:
        return "this fits on one device: use DDP, or one process" if devices > 1 else "this is one device: no pipeline"
    if plan.prediction is None or plan.memory.recompute or plan.memory.offload:
        return None
    costs = plan.prediction.costs
    state = sum(cost.state_bytes for cost in costs)
    saved = sum(cost.saved_bytes for cost in costs) + max(cost.workspace_bytes for cost in costs)
    if state + saved > min(limits):
        return None
    return f"this fits on one device, one microbatch at a time: use DDP over {devices} devices if the batch allows it"


def _offload_text(plan: Plan) -> str:
    stages = plan.memory.offload
    moved = sum(each.bytes * len(each.copies) for each in stages)
    return (
        f"Offload: {bytes_text(moved)} of saved tensors a step to the host and back, "
        f"of stage{'s' * (len(stages) > 1)} {' '.join(str(each.stage) for each in stages)}"
    )


def _shard_text(plan: Plan) -> str:
    """What replicas share, by level."""
    parts = []
    for level, what in SHARED.items():
        stages = [str(stage) for stage, own in enumerate(plan.shard) if own == level]
        if stages:
            parts.append(f"{what} of stage{'s' * (len(stages) > 1)} {' '.join(stages)}")
    runs = sum(len(each.runs) for each in plan.memory.unshard)
    gathers = f"; parameters are gathered {counted(runs, 'time')} a step" if runs else ""
    groups = f"groups of {plan.mesh.sharing} of {plan.mesh.data}" if plan.mesh.sharing else str(plan.mesh.data)
    return f"{groups} replicas share {', '.join(parts)}{gathers}"


def plain_plan(plan: Plan) -> dict[str, Any]:
    """Everything needed to evaluate a plan again."""
    prediction = plan.predicted
    modules = module_ranges([stage.nodes for stage in plan.stages])
    return {
        "stages": [
            {"index": s.index, "device": s.device, "nodes": list(s.nodes), "modules": modules[s.index]}
            for s in plan.stages
        ],
        "device_actions": as_plain(plan.device_actions),
        "recompute": list(plan.memory.recompute),
        **({"recompute_within": plan.memory.within} if plan.memory.within else {}),
        **({"offload": _plain_offload(plan)} if plan.memory.offload else {}),
        **({"shard": list(plan.shard)} if plan.shard else {}),
        **({"sharing": plan.mesh.sharing} if plan.mesh.sharing else {}),
        **({"unshard": as_plain(plan.memory.unshard)} if plan.memory.unshard else {}),
        "predicted_step_s": prediction.step_s,
        "predicted_interval_s": prediction.interval_s,
        "peak_memory_bytes": list(prediction.peak_memory_bytes),
        "schedule": plan.schedule,
        **(_plain_ranks(plan) if plan.mesh.width > 1 else {}),
        "evaluations": prediction.evaluations,
        "efficiency": efficiency(plan),
    }


def _plain_offload(plan: Plan) -> list[dict[str, Any]]:
    return [
        {"stage": each.stage, "bytes": each.bytes, "microbatches": len(each.copies), "storages": len(each.storages)}
        for each in plan.memory.offload
    ]


def _plain_ranks(plan: Plan) -> dict[str, Any]:
    mesh = plan.mesh
    return {
        "tensor": mesh.tensor, "data": mesh.data, "tensor_reduction_share": reduction_share(plan),
        **({"context": mesh.context} if mesh.context > 1 else {}),
        **({"experts": mesh.experts} if mesh.experts > 1 else {}),
    }  # fmt: skip


def reduction_share(plan: Plan) -> float:
    """Time of the exchanges of a stage's ranks ÷ time of F and B, over all stages, without contention."""
    costs = plan.predicted.costs
    reduced_s = sum(sum(cost.reductions.seconds) for cost in costs if cost.reductions)
    return reduced_s / max(sum(map(compute_s, costs)), 1e-300)


def efficiency(plan: Plan) -> float:
    """Σ compute ÷ (devices × predicted step); compute is F, I and W of all operators and microbatches."""
    prediction = plan.predicted
    total_s = plan.microbatches * sum(compute_s(cost) for cost in prediction.costs)
    return ratios.efficiency(total_s, plan.devices, prediction.step_s)


def compute_s(cost: StageCosts) -> float:
    """Seconds of F and B of one microbatch."""
    return cost.forward_s + cost.full_backward_s


def _rates_text(rates: Throughput) -> str:
    words = []
    if (samples := rates.samples_per_s) is not None:
        words.append(f"{samples:,.0f} samples/s" if samples >= 1000 else f"{samples:.4g} samples/s")
    if rates.tokens_per_s is not None:
        words.append(f"{rates.tokens_per_s:,.0f} tokens/s")
    if rates.model_flops_utilisation is not None:
        words.append(f"{rates.model_flops_utilisation:.1%} model-FLOPs utilisation")
    return "Throughput " + ", ".join(words) if words else ""
