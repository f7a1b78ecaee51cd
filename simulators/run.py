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
from .channels import make_channels
from .collectives import Communicator, GradientReduction, reduce_over
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
    """Run one step of a plan, with all its replicas.

    Args:
        plan: what to run; ``validate`` says beforehand whether it runs to the end.
        costs: per stage; those of the plan's prediction by default.
        cluster: devices and links, which ``plan.mesh`` numbers; the prediction's by default.
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
        exchange = match_messages(plan, lower(plan) if lowered is None else lowered).replicated(plan.mesh.data)
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
    network = Network(environment)
    channels = make_channels(network, cluster, exchange.queues, devices, eager)
    for (src, dst), messages in exchange.queues.items():
        issue = channels[src, dst].issue
        for message in messages:
            devices[src].between[message.issued + 1].append(issue)
            devices[dst].pending[message.reader] += 1
    for (src, dst), messages in exchange.queues.items():
        post = channels[src, dst].post
        for message in messages:
            devices[dst].between[message.posted].append(post)
    gradients = _gradient_reductions(network, plan, costs, cluster, exchange, devices)
    tied = [
        reduction
        for first in range(0, plan.mesh.ranks, plan.devices)
        for reduction in _tied_reductions(environment, plan, cluster, exchange, devices, first, gradients)
    ]
    network.find_shared()
    wait_for_others(optimizer, environment, cluster, exchange.operations, devices, [*gradients, *tied], plan.devices)
    for device in devices:
        device.begin()
    environment.run()
    if not all(device.done for device in devices):
        _refuse(exchange, devices)
    result = SimulationResult(
        plan,
        tuple(costs),
        cluster,
        exchange,
        tuple((device.starts, device.ends) for device in devices),
        {
            pair: ([t.start_s for t in channel.transfers], [t.arrived_s for t in channel.transfers])
            for pair, channel in channels.items()
        },
        _reduction_times(tied, gradients),
        memory,
    )
    network.close()
    for device in devices:
        device.close()
    return result


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
    return plan.mesh.arrange(cluster)


def _durations(actions: Sequence[Action], costs: Sequence[StageCosts]) -> list[float]:
    by_stage = [
        {
            Kind.F.value: cost.forward_s,
            Kind.B.value: cost.full_backward_s,
            Kind.I.value: cost.backward_input_s,
            Kind.W.value: cost.backward_weight_s,
            Kind.RECOMPUTE.value: cost.second_forward_s,
            Kind.STEP.value: cost.optimizer_s,
        }
        for cost in costs
    ]
    return [by_stage[action.stage][action.kind.value] for action in actions]


def _step_positions(exchange: Exchange) -> dict[tuple[int, int], int]:
    """For (rank, stage) the position of its STEP."""
    return {
        (rank, action.stage): position
        for rank, actions in enumerate(exchange.operations)
        for position, action in enumerate(actions)
        if action.kind is Kind.STEP
    }


def _gradient_reductions(
    network: Network,
    plan: Plan,
    costs: Sequence[StageCosts],
    cluster: Cluster,
    exchange: Exchange,
    devices: Sequence[DeviceQueue],
) -> list[GradientReduction]:
    """The reduction of every stage over its replicas, joined where their devices issue REDUCE_GRAD."""
    if plan.mesh.data == 1:
        return []
    steps = _step_positions(exchange)
    result = []
    for position in range(plan.devices):
        ranks = range(position, plan.mesh.ranks, plan.devices)
        issued = exchange.gradients[position]
        reductions = []
        for _, stage in issued:
            members = [(rank, devices[rank], steps[rank, stage]) for rank in ranks]
            reductions.append(reduce_over(network, cluster, costs[stage].gradient_bytes, stage, members))
        communicator = Communicator(reductions)
        for (at, _), reduction in zip(issued, reductions, strict=True):
            for rank in ranks:
                devices[rank].between[at].append(partial(communicator.join, reduction, rank))
        result += reductions
    return result


def _tied_reductions(
    environment: Environment,
    plan: Plan,
    cluster: Cluster,
    exchange: Exchange,
    devices: Sequence[DeviceQueue],
    first: int,
    gradients: Sequence[GradientReduction],
) -> list[TiedReduction]:
    """Of one replica the reduction of every tied weight, joined where its stages' devices issue REDUCE_TIED.

    Args:
        first: rank of the replica's first device.
        gradients: over a data dimension these sums come first.
    """
    steps = _step_positions(exchange)
    issued = {stage: at for tied in exchange.reductions[first : first + plan.devices] for at, stage in tied}
    reduced = {reduction.stage: reduction for reduction in gradients}
    result = []
    for weight in plan.tied:
        ranks = {stage: first + plan.placement[stage] for stage in weight.stages}
        absent = next(
            (stage for stage, rank in ranks.items() if stage not in issued or (rank, stage) not in steps), None
        )
        if absent is not None:
            raise RequestError(
                f"stage {absent} holds the tied weight '{weight.name}' and issues no REDUCE_TIED with a STEP behind "
                "it: add them"
            )
        readers = {stage: (rank, devices[rank], steps[rank, stage]) for stage, rank in ranks.items()}
        reduction = TiedReduction(environment, weight, reduction_s(cluster, weight, ranks.values()), readers)
        for stage, rank in ranks.items():
            join = partial(reduction.join, stage)
            devices[rank].between[issued[stage]].append(join)
            if stage in reduced:
                reduction.expect(stage)
                reduced[stage].on_end.append(join)
        result.append(reduction)
    return result


def _reduction_times(
    tied: Sequence[TiedReduction], gradients: Sequence[GradientReduction]
) -> tuple[ReductionTimes, ...]:
    """Of every device and stage the reductions, those of several tied weights as one."""
    sums: dict[tuple[int, int], ReductionTimes] = {}
    for reduction in tied:
        for stage, (rank, _, _) in reduction.readers.items():
            before = sums.get((rank, stage))
            sums[rank, stage] = ReductionTimes(
                rank,
                stage,
                reduction.joined_s[stage],
                max(reduction.end_s, before.end_s if before else 0.0),
                Kind.REDUCE_TIED,
                max(reduction.start_s, before.start_s if before else 0.0),
                reduction.weight.bytes + (before.bytes if before else 0.0),
            )
    return (
        *(
            ReductionTimes(
                rank,
                each.stage,
                each.joined_s[rank],
                each.collective.end_s,
                Kind.REDUCE_GRAD,
                each.collective.start_s,
                each.bytes,
            )
            for each in gradients
            for rank, _, _ in each.members
        ),
        *(sums[key] for key in sorted(sums)),
    )


def _refuse(exchange: Exchange, devices: Sequence[DeviceQueue]) -> NoReturn:
    stuck = [
        f"device {number} at {actions[device.position]}"
        for number, (device, actions) in enumerate(zip(devices, exchange.operations, strict=True))
        if not device.done
    ]
    raise RequestError(f"the plan deadlocks: {', '.join(stuck)} wait for each other; panpipe validate names the cycle")
