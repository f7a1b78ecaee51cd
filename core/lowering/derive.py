"""Plans derived from a plan: for fewer microbatches, with other messages, or forward only.

A sound plan stays sound without the actions of some microbatches. The remaining dependencies are a subset of the
original ones, and a subset of an acyclic graph is acyclic. The actions of a stage still ascend by microbatch.

Without backwards, for evaluation, each device runs the forward of its latest stage whose inputs are available. So
messages are read soon after they arrive, and no device idles while it has a forward to run. The result is a fixed
order::

    two devices, four stages in a V, three microbatches, one tick per forward
    device 0   0F0 0F1 0F2 3F0  .  3F1  .  3F2        stages 0 and 3
    device 1    .  1F0 2F0 1F1 2F1 1F2 2F2            stages 1 and 2

The order is that of ticks, in each of which a device runs one forward, so it cannot deadlock. Forwards of real stages
take unequal times; orders by these times are no faster on average.

`stage_by_stage` is the order for parameters that are whole for one stage of a device at a time: each stage runs all
microbatches before the next one of its device. It takes longer in a V, whose first device waits for the last.
"""

from collections.abc import Iterable, Sequence

from attrs import evolve

from ..actions import Action, Kind
from ..costs.costs import StageEdge
from ..errors import RequestError
from ..plan.memory_policy import StageOffload, StageUnshard, UnshardedRun
from ..plan.plan import MemoryPolicy, Plan
from ..policies.recompute import Recompute, recomputed_stages
from ..policies.replicas import whole_at_once
from ..policies.sharding import AUTO, NONE, part_of_parameters


def first_microbatches(plan: Plan, count: int) -> Plan:
    """The plan for its first microbatches only, without its prediction, which covers all of them.

    Args:
        count: how many microbatches to keep, from 1 to the plan's.

    Raises:
        RequestError: the plan has fewer, or ``count`` is below 1.
    """
    if not 1 <= count <= plan.microbatches:
        raise RequestError(
            f"the number of microbatches is {count}, and the plan is for {plan.microbatches}: give 1 to "
            f"{plan.microbatches}"
        )
    if count == plan.microbatches:
        return plan
    orders = tuple(
        tuple(a for a in actions if a.microbatch is not None and a.microbatch < count)
        for actions in plan.device_actions
    )
    unshard = tuple(_first_runs(plan, each, count) for each in plan.memory.unshard)
    memory = evolve(plan.memory, offload=_first_copies(plan, count), unshard=unshard)
    return evolve(plan, microbatches=count, device_actions=orders, memory=memory, prediction=None)


def _first_copies(plan: Plan, count: int) -> tuple[StageOffload, ...]:
    """The offload of the first ``count`` microbatches.

    If an action that a copy names is removed, ``freed_at`` becomes the next remaining action and ``reload_after`` the
    previous one. A copy with no remaining action between the two is removed: nothing would run while its bytes are on
    the host.
    """
    result = []
    for each in plan.memory.offload:
        actions = plan.device_actions[plan.placement[each.stage]]
        at = {action: position for position, action in enumerate(actions)}
        copies = []
        for copy in each.copies:
            away = actions[at[copy.freed_at] : at[copy.reload_after] + 1]
            left = [action for action in away if action.microbatch is not None and action.microbatch < count]
            if copy.microbatch < count and left:
                copies.append(evolve(copy, freed_at=left[0], reload_after=left[-1]))
        if copies:
            result.append(evolve(each, copies=tuple(copies)))
    return tuple(result)


def _first_runs(plan: Plan, unshard: StageUnshard, count: int) -> StageUnshard:
    """The runs of a stage with the first ``count`` microbatches. All runs stay: replicas gather parameters together,
    and another one may have more microbatches."""
    actions = plan.device_actions[plan.placement[unshard.stage]]
    at = {action: position for position, action in enumerate(actions)}

    def left(begin: int, end: int) -> list[Action]:
        return [each for each in actions[begin:end] if each.microbatch is not None and each.microbatch < count]

    runs = []
    for run in unshard.runs:
        before = [] if run.after is None else left(0, at[run.after] + 1)
        after = before[-1] if before else None
        own: list[Action] = []
        if run.first is not None and run.last is not None:
            own = [each for each in left(at[run.first], at[run.last] + 1) if each.stage == unshard.stage]
        runs.append(UnshardedRun(after, own[0] if own else None, own[-1] if own else None))
    return StageUnshard(unshard.stage, tuple(runs))


def with_edges(plan: Plan, edges: Iterable[StageEdge]) -> Plan:
    """The plan with other messages between its stages, not validated; the same plan if the same stages communicate."""
    wanted = tuple(sorted(edges, key=lambda edge: (edge.src, edge.dst)))
    return plan if _directions(wanted) == _directions(plan.edges) else evolve(plan, edges=wanted, prediction=None)


def check_agrees(
    plan: Plan,
    microbatches: int | None,
    schedule: str,
    recompute: Recompute | None,
    offload: bool | None = None,
    shard: str | None = None,
) -> None:
    """Refuse a plan that contradicts other arguments.

    Args:
        schedule: a family's name, or ``auto`` for any.
        recompute: the stages that recompute; None if not requested.
        offload: whether saved tensors are offloaded; None if not requested.
        shard: the level of sharding of all stages; None, or ``auto``, for any.

    Raises:
        RequestError: the first contradiction.
    """

    def refuse(what: str, asked: object, has: object) -> None:
        raise RequestError(f"{what} is {asked} and the plan has {has}: leave {what} out, or plan again with it")

    if microbatches is not None and microbatches != plan.microbatches:
        refuse("microbatches", microbatches, plan.microbatches)
    if schedule not in ("auto", plan.schedule.partition("(")[0]):
        refuse("schedule", f"'{schedule}'", f"'{plan.schedule}'")
    if recompute is not None and (stages := recomputed_stages(recompute, len(plan.stages))) != plan.memory.recompute:
        refuse("recompute", _stages_text(stages), _stages_text(plan.memory.recompute))
    if offload is not None and offload != bool(plan.memory.offload):
        what = [each.stage for each in plan.memory.offload]
        refuse("offload", "asked for" if offload else "'none'", f"offload of {_stages_text(what)}")
    levels = plan.shard or (NONE,) * len(plan.stages)
    if shard not in (None, AUTO) and set(levels) != {shard}:
        refuse("shard", f"'{shard}'", f"shard {', '.join(levels)}")


def _stages_text(stages: Sequence[int]) -> str:
    return f"stages {list(stages)}" if stages else "no stages"


def synchronised(plan: Plan) -> Plan:
    """The plan with optimizer steps that wait for all stages. Its prediction is removed if they did not before."""
    return plan if plan.sync else evolve(plan, sync=True, prediction=None)


def forward_only(plan: Plan) -> Plan:
    """The plan of the forwards only, for evaluation.

    It has the same stages on the same devices, and no saved tensors, reductions, optimizer steps or prediction. Where
    replicas share parameters, and the plan never has those of all stages of a device whole, neither has this one: each
    device runs its stages one after the other. Else whoever runs it has all parameters whole.

    Args:
        plan: a sound plan. The order of each device is derived from its stages and edges.
    """
    edges = tuple(evolve(edge, gradient_bytes=0) for edge in plan.edges)
    shard, memory = tuple[str, ...](), MemoryPolicy()
    if whole_at_once(plan):
        orders = forward_order(plan.placement, edges, plan.devices, plan.microbatches)
    else:
        orders = stage_by_stage(plan.placement, plan.devices, plan.microbatches)
        shard = tuple(level if part_of_parameters(level) else NONE for level in plan.shard)
        memory = MemoryPolicy(unshard=_runs_of_stages(plan.placement, shard, orders))
    return evolve(
        plan, edges=edges, device_actions=orders, tied=(), memory=memory, prediction=None, sync=False,
        forward_only=True, shard=shard,
    )  # fmt: skip


def _runs_of_stages(
    placement: Sequence[int], shard: Sequence[str], orders: Sequence[Sequence[Action]]
) -> tuple[StageUnshard, ...]:
    """One run for each stage whose replicas share parameters, gathered after the stage before it on its device."""
    found = []
    for stage, level in enumerate(shard):
        actions = orders[placement[stage]]
        own = [at for at, action in enumerate(actions) if action.stage == stage]
        if part_of_parameters(level):
            after = actions[own[0] - 1] if own[0] else None
            found.append(StageUnshard(stage, (UnshardedRun(after, actions[own[0]], actions[own[-1]]),)))
    return tuple(found)


def reordered(plan: Plan) -> Plan:
    """A forward-only plan with its compute order derived again from its current messages and microbatches; one that
    runs its stages one after the other needs no other order."""
    if plan.memory.unshard:
        return plan
    return evolve(plan, device_actions=forward_order(plan.placement, plan.edges, plan.devices, plan.microbatches))


def _directions(edges: Iterable[StageEdge]) -> set[tuple[int, int, bool]]:
    return {(edge.src, edge.dst, edge.gradient_bytes > 0) for edge in edges}


def forward_order(
    placement: Sequence[int], edges: Iterable[StageEdge], devices: int, microbatches: int
) -> tuple[tuple[Action, ...], ...]:
    """Per device its forwards, in order; those of a stage ascend by microbatch."""
    stages = range(len(placement))
    sources: list[list[int]] = [[] for _ in stages]
    for edge in edges:
        sources[edge.dst].append(edge.src)
    done = [0] * len(placement)
    orders: list[list[Action]] = [[] for _ in range(devices)]
    while min(done) < microbatches:  # one tick
        starting: dict[int, int] = {}
        for stage in stages:  # a later stage of a device replaces an earlier one
            if done[stage] < microbatches and all(done[source] > done[stage] for source in sources[stage]):
                starting[placement[stage]] = stage
        for device, stage in starting.items():
            orders[device].append(Action(stage, Kind.F, done[stage]))
            done[stage] += 1
    return tuple(map(tuple, orders))


def stage_by_stage(placement: Sequence[int], devices: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Per device all forwards of its first stage, then those of the next one; arguments as of `forward_order`.

    Each waits for earlier stages alone, also where replicas wait for each other before a stage, so it cannot deadlock.
    """
    orders: list[list[Action]] = [[] for _ in range(devices)]
    for stage, device in enumerate(placement):
        orders[device] += [Action(stage, Kind.F, microbatch) for microbatch in range(microbatches)]
    return tuple(map(tuple, orders))
