"""One training step in SimPy: devices with in-order queues, links that they share, and memory."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

from simpy import Environment

from ..core.actions import Action, Kind
from ..core.cluster import Cluster
from ..core.costs import StageCosts
from ..core.errors import RequestError
from ..core.lowering import lower
from ..core.messages import Exchange, match_messages
from ..core.plan import Plan
from .device import DeviceQueue
from .network import Network
from .optimizer import OptimizerStep, wait_for_others
from .reduction import TiedReduction, reduction_s
from .result import SimulationResult
from .times import ReductionTimes


def simulate(
    plan: Plan,
    costs: Sequence[StageCosts] | None = None,
    cluster: Cluster | None = None,
    *,
    eager: bool = False,
    optimizer: OptimizerStep = OptimizerStep.LOCAL,
    memory: bool = True,
    lowered: Sequence[Sequence[Action]] | None = None,
) -> SimulationResult:
    """Run one step of a plan.

    Args:
        plan: what to run; ``validate`` says beforehand whether it runs to the end.
        costs: per stage; those of the plan's prediction by default.
        cluster: devices and links, device d of the plan being the cluster's d-th; the prediction's by default.
        eager: a send needs no posted receive. The buffer of what arrives early is counted from its receive on.
        optimizer: what an optimizer step waits for, beside its own gradients.
        memory: keep the memory timelines.
        lowered: what each device issues, in order; what ``lower(plan)`` gives by default.

    Raises:
        RequestError: there are no costs or no cluster, or they do not fit the plan; the lowered lists do not match; or
            the plan deadlocks.
    """
    costs = _given_costs(plan, costs)
    cluster = _given_cluster(plan, cluster)
    with _collector_paused():
        exchange = match_messages(plan, lower(plan) if lowered is None else lowered)
        return _run(plan, costs, cluster, exchange, eager=eager, optimizer=optimizer, memory=memory)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Without the garbage collector: a run leaves no cycles behind, and one full collection costs as much as a run."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _run(
    plan: Plan,
    costs: Sequence[StageCosts],
    cluster: Cluster,
    exchange: Exchange,
    *,
    eager: bool,
    optimizer: OptimizerStep,
    memory: bool,
) -> SimulationResult:
    environment = Environment()
    devices = [DeviceQueue(environment, _durations(actions, costs)) for actions in exchange.operations]
    network = Network(environment, cluster, exchange.queues, devices, eager)
    for pair, messages in exchange.queues.items():
        channel = network.channels[pair]
        for message in messages:
            devices[message.src].between[message.issued + 1].append(channel.issue)
            devices[message.dst].pending[message.reader] += 1
    for pair, messages in exchange.queues.items():
        channel = network.channels[pair]
        for message in messages:
            devices[message.dst].between[message.posted].append(channel.post)
    reductions = _reductions(environment, plan, cluster, exchange, devices)
    wait_for_others(optimizer, environment, cluster, exchange.operations, devices, reductions)
    for device in devices:
        device.begin()
    environment.run()
    if not all(device.done for device in devices):
        _refuse(exchange, devices)
    transfer_times = network.times()
    network.close()
    for device in devices:
        device.close()
    return SimulationResult(
        plan,
        tuple(costs),
        cluster,
        exchange,
        tuple((device.starts, device.ends) for device in devices),
        transfer_times,
        _reduction_times(plan, exchange, reductions),
        memory,
    )


def _given_costs(plan: Plan, costs: Sequence[StageCosts] | None) -> Sequence[StageCosts]:
    if costs is None:
        if plan.prediction is None:
            raise RequestError(f"the plan of '{plan.model}' holds no costs: plan it with a profile, or give costs")
        costs = plan.prediction.costs
    if len(costs) != len(plan.stages):
        raise RequestError(f"{len(costs)} costs for {len(plan.stages)} stages: give one for each stage")
    return costs


def _given_cluster(plan: Plan, cluster: Cluster | None) -> Cluster:
    if cluster is None:
        if plan.prediction is None:
            raise RequestError(f"the plan of '{plan.model}' holds no cluster: plan it for one, or give a cluster")
        cluster = plan.prediction.cluster
    if plan.mesh.data != 1:
        raise RequestError(
            f"the plan has {plan.mesh.data} replicas along the data dimension: one pipeline is simulated; "
            "use a plan with mesh.data = 1"
        )
    if len(cluster.devices) < plan.devices:
        raise RequestError(
            f"the plan needs {plan.devices} devices and the cluster has {len(cluster.devices)}: use a larger cluster, "
            "or plan for this one"
        )
    return cluster


def _durations(actions: Sequence[Action], costs: Sequence[StageCosts]) -> list[float]:
    by_stage = [
        {
            Kind.F.value: cost.forward_s,
            Kind.B.value: cost.full_backward_s,
            Kind.I.value: cost.backward_input_s,
            Kind.W.value: cost.backward_weight_s,
            Kind.STEP.value: cost.optimizer_s,
        }
        for cost in costs
    ]
    return [by_stage[action.stage][action.kind.value] for action in actions]


def _reductions(
    environment: Environment, plan: Plan, cluster: Cluster, exchange: Exchange, devices: Sequence[DeviceQueue]
) -> list[TiedReduction]:
    """The reduction of every tied weight, joined where its stages' devices issue REDUCE_TIED."""
    steps = {
        action.stage: position
        for actions in exchange.operations
        for position, action in enumerate(actions)
        if action.kind is Kind.STEP
    }
    issued = {stage: at for tied in exchange.reductions for at, stage in tied}
    result = []
    for weight in plan.tied:
        absent = next((stage for stage in weight.stages if stage not in issued or stage not in steps), None)
        if absent is not None:
            raise RequestError(
                f"stage {absent} holds the tied weight '{weight.name}' and issues no REDUCE_TIED with a STEP behind "
                "it: add them"
            )
        readers = {stage: (devices[plan.placement[stage]], steps[stage]) for stage in weight.stages}
        reduction = TiedReduction(environment, weight, reduction_s(plan, cluster, weight), readers)
        for stage in weight.stages:
            devices[plan.placement[stage]].between[issued[stage]].append(partial(reduction.join, stage))
        result.append(reduction)
    return result


def _reduction_times(plan: Plan, exchange: Exchange, reductions: Sequence[TiedReduction]) -> tuple[ReductionTimes, ...]:
    ends: dict[int, float] = {}
    starts: dict[int, float] = {}
    for reduction in reductions:
        for stage in reduction.weight.stages:
            ends[stage] = max(ends.get(stage, 0.0), reduction.end_s)
            starts[stage] = reduction.joined_s[stage]
    return tuple(ReductionTimes(plan.placement[stage], stage, starts[stage], ends[stage]) for stage in sorted(ends))


def _refuse(exchange: Exchange, devices: Sequence[DeviceQueue]) -> NoReturn:
    stuck = [
        f"device {number} at {actions[device.position]}"
        for number, (device, actions) in enumerate(zip(devices, exchange.operations, strict=True))
        if not device.done
    ]
    raise RequestError(f"the plan deadlocks: {', '.join(stuck)} wait for each other; panpipe validate names the cycle")
