"""Validation, before anything runs: a plan that validates is consistent, does not deadlock, and fits its devices.

State, saved tensors and the workspace of the running action must fit: the peak that plans predict. A device that
exceeds its limit only with communication buffers gets a warning. An error reports what does not fit. If a search finds
no plan that fits, its error is in `core/search/suggestions/infeasible`, and the changes that help in `changes` next to
it.
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest

from attrs import frozen

from ..actions import COMM_KINDS, Action, Kind
from ..costs.costs import StageCosts, compute_times
from ..errors import InfeasibleError, RequestError, refuse_other_kinds
from ..lowering.lowering import lower
from ..lowering.queues import Queues, queues_of
from ..lowering.residency import Timeline, device_timelines
from ..plan.kinds import seconds_alone
from ..plan.plan import Plan
from ..policies.sharding import replica_costs
from ..timing.engine import Engine, refuse_cycle
from ..timing.orders import run_alone
from .host_memory import check_host_memory
from .structure import check_structure


@frozen
class ValidationReport:
    """The result of validating a plan.

    Args:
        warnings: lines about what is valid, but slower, less exact or close to a memory limit.
        peak_memory_bytes, peak_saved_bytes: per device along the pipeline: all memory with communication buffers, and
            saved tensors only. Empty if the plan has no costs.
        peak_actions: per device the action that reaches the peak of all memory.
        host_bytes: per device the size of its host arena, for what it offloads.
    """

    warnings: tuple[str, ...] = ()
    peak_memory_bytes: tuple[float, ...] = ()
    peak_saved_bytes: tuple[float, ...] = ()
    peak_actions: tuple[Action | None, ...] = ()
    host_bytes: tuple[int, ...] = ()


def validate(
    plan: Plan, memory_limits: Sequence[float] | None = None, *, lowered: Sequence[Sequence[Action]] | None = None
) -> ValidationReport:
    """Check a plan.

    Args:
        plan: the plan; costs and cluster are those of its prediction, if it has one.
        memory_limits: bytes for each device along the pipeline; by default the cluster's ``memory_bytes``, of the
            replica that has least.
        lowered: per device its actions, in order, with sends and receives of a schedule file; by default
            ``lower(plan)``.

    Raises:
        RequestError: the plan is inconsistent, or it deadlocks (the message shows the cycle).
        InfeasibleError: a device or a host runs out of memory.
    """
    refuse_other_kinds("plan", plan, Plan, "a Plan, such as panpipe.read_plan('plan.json')")
    return check_resources(check_actions(plan, lowered), memory_limits)


@frozen
class CheckedActions:
    """A consistent plan that does not deadlock, lowered.

    Args:
        engine: its step without shared links; without times if the plan has no costs.
    """

    plan: Plan
    warnings: tuple[str, ...]
    queues: Queues
    engine: Engine


def check_actions(
    plan: Plan, lowered: Sequence[Sequence[Action]] | None = None, *, placed: bool = False
) -> CheckedActions:
    """Check that a plan is consistent and runs to the end. Arguments and errors as of `validate`.

    Args:
        placed: ``lowered`` comes from lowering, and is not compared with it.
    """
    warnings = check_structure(plan)
    if lowered is not None and not placed:
        check_placed(plan, lowered)
    queues = queues_of(plan, lower(plan) if lowered is None else lowered)
    engine, ends = _run_alone(plan, queues)
    if not ends:
        refuse_cycle(engine)
    return CheckedActions(plan, tuple(warnings), queues, engine)


def check_resources(checked: CheckedActions, memory_limits: Sequence[float] | None = None) -> ValidationReport:
    """Check that a checked plan fits its devices and hosts. Arguments and errors as of `validate`."""
    plan = checked.plan
    if plan.prediction is None:
        if memory_limits is not None:
            raise RequestError("memory limits are given and the plan holds no costs: plan it with a profile")
        return ValidationReport(checked.warnings)
    costs, cluster = plan.prediction.costs, plan.mesh.arrange(plan.prediction.cluster)
    if memory_limits is None:
        memory_limits = plan.mesh.memory_bytes(plan.prediction.cluster)
    if len(memory_limits) != plan.devices:
        raise RequestError(
            f"there are {len(memory_limits)} memory limits for {plan.devices} devices: give one for each"
        )
    timelines = device_timelines(plan, costs, checked.queues, checked.engine.operations, checked.engine.arrivals)
    warnings = [*checked.warnings, *check_memory(plan, costs, timelines, memory_limits)]
    host_bytes = check_host_memory(plan, cluster)
    return ValidationReport(
        tuple(warnings),
        tuple(timeline.peak_bytes for timeline in timelines),
        tuple(timeline.peak_saved_bytes for timeline in timelines),
        tuple(timeline.peak_action for timeline in timelines),
        host_bytes,
    )


def check_placed(plan: Plan, lowered: Sequence[Sequence[Action]]) -> None:
    """Check that lists given by hand have the actions of lowering, in its order apart from sends and receives.

    Raises:
        RequestError: a list has another action, or lacks one.
    """
    if len(lowered) != plan.devices:
        raise RequestError(f"there are {len(lowered)} lowered lists for {plan.devices} devices: give one for each")
    for device, (given, own) in enumerate(zip(lowered, lower(plan), strict=True)):
        found, wanted = ([action for action in each if action.kind not in COMM_KINDS] for each in (given, own))
        for here, there in zip_longest(found, wanted) if found != wanted else ():
            if here != there:
                raise RequestError(
                    f"device {device} issues {here or 'nothing'} where the plan has {there or 'nothing'}: between "
                    "sends and receives a list has what lowering places, in its order"
                )
        more, fewer = Counter(given) - Counter(own), Counter(own) - Counter(given)
        if more or fewer:
            action = next(iter(more or fewer))
            what = f"{action}, which the plan does not have, or twice: remove it" if more else f"no {action}: add it"
            raise RequestError(f"device {device} issues {what}")


def _run_alone(plan: Plan, queues: Queues) -> tuple[Engine, bool]:
    """The step without shared links, and whether it runs to its end."""
    if plan.prediction is None:
        return run_alone(plan, queues)
    costs, cluster = plan.prediction.costs, plan.mesh.arrange(plan.prediction.cluster)
    seconds = compute_times(queues.compute, replica_costs(plan, costs))
    return run_alone(plan, queues, seconds, cluster, seconds_alone(queues.tasks, plan, costs, cluster))


def check_memory(
    plan: Plan, costs: Sequence[StageCosts], timelines: Sequence[Timeline], limits: Sequence[float]
) -> list[str]:
    """Compare each device's peak with its limit, in bytes.

    Returns:
        Warnings.

    Raises:
        InfeasibleError: a device is over its limit; the message names the device, the action, the excess and a fix.
    """
    warnings = []
    for device, (timeline, limit) in enumerate(zip(timelines, limits, strict=True)):
        state = sum(timeline.state)
        working = timeline.working
        worst = int(working.argmax())
        over = float(working[worst]) - limit
        if over > 0:
            position = int(timeline.operations[worst])
            at = f"at {timeline.actions[position]}" if timeline.actions else "before anything runs"
            raise InfeasibleError(
                f"device {device} holds {working[worst]:.0f} bytes {at} and has {limit:.0f}: {over:.0f} too many; "
                + _smallest_change(plan, timeline.actions[: position + 1], costs, over, state - limit)
            )
        if timeline.peak_bytes > limit:
            warnings.append(
                f"device {device} holds {timeline.peak_bytes:.0f} bytes at {timeline.peak_action} with its "
                f"communication buffers and has {limit:.0f}: {timeline.peak_bytes - limit:.0f} too many if "
                "all buffers are in use"
            )
    return warnings


def _smallest_change(
    plan: Plan, actions: Sequence[Action], costs: Sequence[StageCosts], over: float, state_over: float
) -> str:
    if state_over > 0:
        return (
            f"its parameters, gradients and optimizer state alone are {state_over:.0f} too many; move operators to "
            f"another device, or give the device {over:.0f} bytes more"
        )
    again = plan.memory.recompute
    each = {i: cost.input_bytes if i in again else cost.saved_bytes for i, cost in enumerate(costs)}
    held = _held(actions)
    most = max(held, key=lambda stage: (each[stage], -stage), default=None)
    change = f"give the device {over:.0f} bytes more"
    if most is None or not each[most]:
        return change
    keeps = [i for i in held if i not in again and i not in plan.offloaded_bytes]
    less = {i: (held[i] - 1) * (each[i] - costs[i].input_bytes) for i in keeps}
    best = max(less, key=lambda stage: (less[stage], -stage), default=None)
    if best is not None and less[best] >= over:
        change += (
            f", or recompute stage {best} (it keeps {costs[best].input_bytes:.0f} bytes of a microbatch then, and "
            f"saves {costs[best].saved_bytes:.0f} now)"
        )
    fewer = math.ceil(over / each[most])
    if fewer < held[most] and most not in plan.offloaded_bytes:
        return (
            f"{change}, or start {fewer} fewer of the {held[most]} microbatches that stage {most} holds then "
            f"({each[most]:.0f} bytes each)"
        )
    return f"{change}, or cut the batch into more microbatches (stage {most} saves {each[most]:.0f} bytes of each)"


def _held(actions: Sequence[Action]) -> Counter[int]:
    """Per stage the number of microbatches with saved tensors while the last of these actions runs."""
    held: Counter[int] = Counter(action.stage for action in actions if action.kind is Kind.F)
    held.subtract(action.stage for action in actions[:-1] if action.kind in (Kind.B, Kind.W))
    return +held
