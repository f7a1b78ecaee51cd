"""One training step in SimPy: devices with in-order queues, shared links, and memory."""

from collections.abc import Sequence
from typing import NoReturn

from attrs import evolve
from simpy import Environment

from ..core.actions import Action, Kind
from ..core.cluster.cluster import Cluster
from ..core.costs.costs import StageCosts, compute_times
from ..core.errors import RequestError, refuse_other_kinds
from ..core.garbage import collector_paused
from ..core.lowering.lowering import lower
from ..core.lowering.queues import Queues, queues_of
from ..core.plan.kinds import seconds_alone
from ..core.plan.plan import Plan
from ..core.policies.sharding import replica_costs
from ..core.timing.orders import run_alone
from ..core.validation.validate import CheckedActions, check_placed
from .channels import connect
from .device import DeviceQueue
from .network import Network
from .optimizer_step import OptimizerStep, validate_afterwards, with_sync
from .result import SimulationResult
from .tasks import run_tasks, task_flows, task_times
from .tensor_sums import connect_sums, tensor_sums
from .usage import DIRECTIONS


def simulate(
    plan: Plan,
    costs: Sequence[StageCosts] | None = None,
    cluster: Cluster | None = None,
    *,
    eager: bool = False,
    optimizer: OptimizerStep | None = None,
    sharing: bool = True,
    lowered: Sequence[Sequence[Action]] | None = None,
    checked: CheckedActions | None = None,
) -> SimulationResult:
    """Run one step of a plan, with all its replicas. All of them take a stage's times from the same costs.

    Args:
        plan: the plan to run; ``validate`` checks beforehand whether it runs to the end.
        costs: per stage; those of the plan's prediction by default.
        cluster: devices and links, which ``plan.mesh`` numbers; the prediction's by default.
        eager: a send needs no posted receive. The buffer of an early arrival counts from its receive on.
        optimizer: what an optimizer step waits for in addition to its own gradients; by default a barrier if
            ``plan.sync``, else nothing.
        sharing: transfers share the bandwidth of links; otherwise each has the full bandwidth of its route.
        lowered: per device its actions, in order; by default ``lower(plan)``.
        checked: the plan's checked actions, instead of ``lowered``: they are not lowered and sorted again, if the steps
            wait as in the plan.

    Raises:
        RequestError: there are no costs or no cluster, or they do not fit the plan; the lowered lists do not match; or
            the plan deadlocks.
    """
    refuse_other_kinds("plan", plan, Plan, "a Plan, such as panpipe.read_plan('plan.json')")
    wanted = "an OptimizerStep of panpipe.simulators.optimizer_step, or None"
    refuse_other_kinds("optimizer", optimizer, OptimizerStep | None, wanted)
    costs = _given_costs(plan, costs)
    cluster = _given_cluster(plan, cluster)
    mode, run_plan = optimizer or _default_step(plan), plan
    if plan.sync != (mode is OptimizerStep.BARRIER):
        run_plan, checked = evolve(plan, sync=not plan.sync), None
        lowered = None if lowered is None else with_sync(lowered, run_plan.sync)
    with collector_paused():
        if checked is None:
            if lowered is None:
                lowered = lower(run_plan)
            else:
                check_placed(run_plan, lowered)
        one = queues_of(run_plan, lowered or ()) if checked is None else checked.queues
        queues = one.replicated(plan.mesh.data)
        return _run(plan, costs, cluster, queues, eager=eager, optimizer=mode, sharing=sharing)


def _default_step(plan: Plan) -> OptimizerStep:
    return OptimizerStep.BARRIER if plan.sync else OptimizerStep.LOCAL


def _run(
    plan: Plan,
    costs: Sequence[StageCosts],
    cluster: Cluster,
    queues: Queues,
    *,
    eager: bool,
    optimizer: OptimizerStep,
    sharing: bool,
) -> SimulationResult:
    environment = Environment()
    durations = compute_times(queues.compute, replica_costs(plan, costs))
    sums = tensor_sums(cluster, queues.compute, costs)
    for seconds, own in zip(durations, sums, strict=False):
        for operation, sum_s in own.items():
            seconds[operation] += sum_s.extra_s
    devices = [DeviceQueue(environment, seconds) for seconds in durations]
    network = Network(environment)
    channels = connect(network, cluster, queues.messages, devices, eager)
    tasks = run_tasks(network, plan, costs, cluster, queues, devices)
    sum_flows = connect_sums(network, cluster, sums, devices)
    if sharing:
        network.find_shared()
    if optimizer is OptimizerStep.POST_VALIDATION:
        validate_afterwards(network, plan, cluster, queues, devices, tasks)
    for device in devices:
        device.begin()
    environment.run()
    if not all(device.done for device in devices):
        _refuse(queues, devices)
    result = SimulationResult(
        plan,
        tuple(costs),
        cluster,
        queues,
        tuple((device.starts, device.ends) for device in devices),
        {pair: [flow.times for flow in channel.flows] for pair, channel in channels.items()},
        task_times([running for running in tasks if plan.sync or running.task.kind is not Kind.SYNC]),
        (*task_flows(tasks), *(flow.times for flow in sum_flows)),
    )
    # All references between them end here, so that everything is freed at once: collecting cycles would take as long as
    # a run.
    network.close()
    for channel in channels.values():
        channel.flows.clear()
    for running in tasks:
        running.on_end.clear()
        running.steps.clear()
    for device in devices:
        device.close()
    return result


def alone_s(
    plan: Plan, costs: Sequence[StageCosts], cluster: Cluster, update: bool = True, queues: Queues | None = None
) -> float:
    """Seconds of a step of a sound plan, with all its replicas, in which every transfer has the full bandwidth of its
    path: by the engine, which agrees with a simulation without shared links to 1e-9 and takes a fraction of its time.

    Args:
        cluster: its devices in the order of ranks.
        update: whether optimizer steps, and all tasks but host copies, take time.
        queues: of the lowered plan with all its replicas; None to lower it.
    """
    queues = queues or queues_of(plan, lower(plan)).replicated(plan.mesh.data)
    seconds = compute_times(queues.compute, replica_costs(plan, costs))
    for own, sums in zip(seconds, tensor_sums(cluster, queues.compute, costs), strict=False):
        for operation, each in sums.items():
            own[operation] += each.alone_s
    task_s = seconds_alone(queues.tasks, plan, costs, cluster)
    if not update:
        for own, actions in zip(seconds, queues.compute, strict=True):
            own[:] = [0.0 if action.kind is Kind.STEP else s for s, action in zip(own, actions, strict=True)]
        task_s = [s if task.kind in DIRECTIONS else 0.0 for s, task in zip(task_s, queues.tasks, strict=True)]
    return run_alone(plan, queues, seconds, cluster, task_s)[0].step_s


def _given_costs(plan: Plan, costs: Sequence[StageCosts] | None) -> Sequence[StageCosts]:
    if costs is None:
        if plan.prediction is None:
            raise RequestError(f"the plan of '{plan.model}' holds no costs: plan it with a profile, or give costs")
        costs = plan.prediction.costs
    if len(costs) != len(plan.stages):
        raise RequestError(f"there are {len(costs)} costs for {len(plan.stages)} stages: give one for each stage")
    return costs


def _given_cluster(plan: Plan, cluster: Cluster | None) -> Cluster:
    if cluster is None:
        if plan.prediction is None:
            raise RequestError(f"the plan of '{plan.model}' holds no cluster: plan it for one, or give a cluster")
        cluster = plan.prediction.cluster
    return plan.mesh.arrange(cluster)


def _refuse(queues: Queues, devices: Sequence[DeviceQueue]) -> NoReturn:
    stuck = [
        f"device {number} at {actions[device.position]}"
        for number, (device, actions) in enumerate(zip(devices, queues.compute, strict=True))
        if not device.done
    ]
    raise RequestError(f"the plan deadlocks: {', '.join(stuck)} wait for each other; panpipe validate shows the cycle")
