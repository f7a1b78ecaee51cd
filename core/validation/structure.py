"""Structure of a plan: its stages and edges are consistent, and each action is listed once, after those it needs.

A stage offloads at most what it saves, and no action reads tensors that are on the host.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from attrs import asdict

from ..actions import COMPUTE_KINDS, Action, Kind
from ..cluster.rank_kinds import CONTEXT_RANKS, EXPERT_RANKS, TENSOR_RANKS
from ..cluster.tensor_groups import GroupedCluster
from ..costs.costs import StageCosts
from ..errors import RequestError
from ..plan.memory_policy import HostCopy, StageOffload, StageUnshard, backward_of
from ..plan.plan import Plan
from ..policies.sharding import NONE, check_sharding, part_of_parameters, shards_parameters
from ..wording import first_of


def check_structure(plan: Plan) -> list[str]:
    """Check placement, numbering, edges, tied weights, compute order and memory policy.

    Returns:
        Warnings: properties that are valid, but make training slower or change the last bits of its results.

    Raises:
        RequestError: a part is inconsistent; the message names it, the rule and the fix.
    """
    _check_shape(plan)
    check_sharding(plan)
    _check_memory_policy(plan)
    _check_forward_only(plan)
    _check_edges(plan)
    _check_prediction(plan)
    warnings = [f"device {d} holds no stage and idles" for d in range(plan.devices) if not plan.stages_on(d)]
    warnings += _check_orders(plan)
    check_offload(plan)
    _check_unshard(plan)
    return warnings


def _check_shape(plan: Plan) -> None:
    mesh = plan.mesh
    mesh.check()
    if plan.microbatches < 1:
        raise RequestError(f"the plan has {plan.microbatches} microbatches: it needs at least 1; plan again")
    if not plan.stages:
        raise RequestError("the plan has no stages: it needs at least 1; plan again")
    if len(plan.device_actions) != mesh.pipeline:
        raise RequestError(
            f"the plan orders the actions of {len(plan.device_actions)} devices and its mesh has {mesh.pipeline}: "
            "give one order for each device"
        )
    for position, stage in enumerate(plan.stages):
        if stage.index != position:
            raise RequestError(f"stage {stage.index} is at position {position}: stages are numbered in order from 0")
        if not 0 <= stage.device < mesh.pipeline:
            raise RequestError(
                f"stage {position} is on device {stage.device}, and devices go from 0 to {mesh.pipeline - 1}: move it"
            )
    for weight in plan.tied:
        if len(weight.stages) < 2 or any(a >= b for a, b in zip(weight.stages, weight.stages[1:], strict=False)):
            raise RequestError(
                f"tied weight '{weight.name}' has stages {list(weight.stages)}: at least two, in order, each once"
            )
        if weight.stages[0] < 0 or weight.stages[-1] >= len(plan.stages):
            raise RequestError(
                f"tied weight '{weight.name}' has stages {list(weight.stages)} of {len(plan.stages)}: "
                f"they go from 0 to {len(plan.stages) - 1}"
            )


def _check_memory_policy(plan: Plan) -> None:
    if plan.memory.offload and plan.mesh.width > 1:
        raise RequestError(
            f"memory.offload is not empty and the mesh has {plan.mesh.width} ranks a position, whose copies to hosts "
            "are not supported; remove it, or plan again without them"
        )
    offload = tuple(each.stage for each in plan.memory.offload)
    unshard = tuple(each.stage for each in plan.memory.unshard)
    for name, stages in (("recompute", plan.memory.recompute), ("offload", offload), ("unshard", unshard)):
        if list(stages) != sorted(set(stages) & set(range(len(plan.stages)))):
            named = first_of([str(stage) for stage in stages], 16)
            raise RequestError(
                f"memory.{name} names stages [{named}]: stages go from 0 to {len(plan.stages) - 1}, each at most "
                "once and in order; correct the list"
            )


def _check_unshard(plan: Plan) -> None:
    """Check that exactly the stages whose replicas share parameters have runs."""
    sharing = [stage.index for stage in plan.stages if shards_parameters(plan, stage.index)]
    named = [each.stage for each in plan.memory.unshard]
    if named != sharing:
        stage = min(set(named) ^ set(sharing))
        fix = "plan again, or give its runs" if stage in sharing else "remove it"
        raise RequestError(
            f"memory.unshard {'lacks' if stage in sharing else 'names'} stage {stage}, whose replicas "
            f"{'share' if stage in sharing else 'do not share'} parameters: {fix}"
        )
    for each in plan.memory.unshard:
        device = plan.placement[each.stage]
        _check_runs(each, device, plan.device_actions[device])


def _check_forward_only(plan: Plan) -> None:
    """Check that a forward-only plan has nothing that needs a backward."""
    if not plan.forward_only:
        return
    needs = {
        "memory.recompute": plan.memory.recompute,
        "memory.offload": [each.stage for each in plan.memory.offload],
        "tied": [weight.name for weight in plan.tied],
        "sync": ["true"] if plan.sync else [],
        "shard": [level for level in plan.shard if level != NONE and not part_of_parameters(level)],
        "edges with gradients": [f"{edge.src} → {edge.dst}" for edge in plan.edges if edge.gradient_bytes],
    }
    name = next((name for name, found in needs.items() if found), None)
    if name is not None:
        raise RequestError(
            f"the plan is forward only and has {name}: {', '.join(map(str, needs[name]))}; these belong to a backward; "
            "remove them"
        )


def _check_edges(plan: Plan) -> None:
    seen = set()
    for edge in plan.edges:
        name = f"edge {edge.src} → {edge.dst}"
        if not 0 <= edge.src < edge.dst < len(plan.stages):
            raise RequestError(
                f"{name} is not from a stage to a later one of the {len(plan.stages)}: edges run forward; reverse it"
            )
        if (edge.src, edge.dst) in seen:
            raise RequestError(f"{name} is listed twice: all its tensors are one message; merge the two")
        seen.add((edge.src, edge.dst))
        if edge.bytes < 0 or edge.gradient_bytes < 0:
            raise RequestError(f"{name} has {edge.bytes} and {edge.gradient_bytes} bytes: sizes are at least 0")


def _check_prediction(plan: Plan) -> None:
    if plan.prediction is None:
        return
    costs, cluster = plan.prediction.costs, plan.prediction.cluster
    if len(costs) != len(plan.stages):
        raise RequestError(
            f"the prediction has costs of {len(costs)} stages and the plan has {len(plan.stages)}: plan again"
        )
    plan.mesh.check(cluster)
    for name in ("peak_memory_bytes", "peak_saved_bytes"):
        peaks = getattr(plan.prediction, name)
        if len(peaks) not in (0, plan.devices):
            raise RequestError(f"{name} of the prediction is of {len(peaks)} devices of {plan.devices}: plan again")
    if plan.mesh.width > plan.mesh.context and all(cost.reductions is None for cost in costs):
        raise RequestError(
            f"the mesh has {plan.mesh.width} ranks at a position and the costs are of stages without: plan again"
        )
    for stage, cost in enumerate(costs):
        found = asdict(cost)
        del found["reductions"]
        for each in cost.reductions.each if cost.reductions is not None else ():
            own = {name: value for name, value in asdict(each).items() if name not in ("over", "more")}
            found |= {f"reductions.{name}": value for name, value in own.items()}
        for name, value in found.items():
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise RequestError(f"{name} of stage {stage} is {value}: costs are finite and at least 0; plan again")
        _check_reductions(plan, stage, cost)


def _check_reductions(plan: Plan, stage: int, cost: StageCosts) -> None:
    """Check that all-reduces over tensor ranks have ranks, and fit in the stage's times."""
    found = cost.reductions
    if found is None:
        return
    cluster = plan.predicted.cluster
    kinds = {TENSOR_RANKS: plan.mesh.tensor, CONTEXT_RANKS: plan.mesh.context, EXPERT_RANKS: plan.mesh.experts}
    if isinstance(cluster, GroupedCluster):
        kinds = {TENSOR_RANKS: cluster.tensor, CONTEXT_RANKS: cluster.context, EXPERT_RANKS: cluster.experts}
    for each in found.each:
        if each.ranks != kinds.get(each.over):
            raise RequestError(
                f"the costs of stage {stage} are of {each.ranks} {each.over} ranks and the mesh has "
                f"{kinds.get(each.over)}: plan again"
            )
    least = min(cost.backward_input_s, cost.full_backward_s)
    again = cost.second_forward_s
    forward_s, backward_s = found.seconds
    for name, seconds, limit in (
        ("forward", forward_s, min(cost.forward_s, again)), ("backward", backward_s, least),
    ):  # fmt: skip
        if seconds > limit * (1 + 1e-9):
            raise RequestError(
                f"reductions.{name}_s of stage {stage} is {seconds} and its whole {name} takes {limit}: it is a part; "
                "plan again"
            )


def _check_action(plan: Plan, device: int, action: Action) -> None:
    placement = plan.placement
    if action.kind not in COMPUTE_KINDS:
        rule = "is not compute: an order holds F, B, I and W only; remove it"
    elif not 0 <= action.stage < len(placement):
        rule = f"names no stage: they go from 0 to {len(placement) - 1}; remove it"
    elif action.microbatch is None or not 0 <= action.microbatch < plan.microbatches:
        rule = f"names no microbatch: they go from 0 to {plan.microbatches - 1}; remove it"
    elif placement[action.stage] != device:
        rule = f"is on the wrong device: stage {action.stage} is on device {placement[action.stage]}; move it there"
    else:
        return
    raise RequestError(f"{action} in the order of device {device} {rule}")


_AFTER = {Kind.B: Kind.F, Kind.I: Kind.F, Kind.W: Kind.I}
"""What the same stage runs first for the same microbatch."""


def _check_orders(plan: Plan) -> list[str]:
    """Every stage and microbatch has one F and then one full backward, or only F in a forward-only plan; microbatches
    ascend."""
    runs: dict[tuple[int, int | None], str] = {}  # the letters of the kinds that a stage runs for a microbatch
    latest: dict[tuple[int, Kind], Action] = {}
    warnings: dict[tuple[int, Kind], str] = {}
    for device, actions in enumerate(plan.device_actions):
        for action in actions:
            _check_action(plan, device, action)
            stage, kind, microbatch = action.stage, action.kind, action.microbatch
            letters, first = runs.get((stage, microbatch), ""), _AFTER.get(kind)
            if kind.value in letters:
                raise RequestError(f"{action} is listed twice: every action runs once; remove one")
            if first is not None and first.value not in letters:
                needed = Action(stage, first, microbatch)
                if needed in actions:
                    raise RequestError(f"{action} is before {needed} on device {device}: {first} runs first; swap them")
            runs[stage, microbatch] = letters + kind.value
            before = latest.get((stage, kind))
            if before is not None and (microbatch or 0) < (before.microbatch or 0):
                text = f"{action} is after {before} on device {device}"
                if kind is Kind.F:
                    raise RequestError(f"{text}: within a stage F ascends by microbatch; swap them")
                warnings.setdefault(
                    (stage, kind),
                    f"{text}: sums of gradients differ in their last bits from those of a plan in which {kind.value} "
                    "ascends by microbatch",
                )
            latest[stage, kind] = action
    usual = ("F",) if plan.forward_only else ("FB", "FIW")
    every = ((stage, microbatch) for stage in range(len(plan.stages)) for microbatch in range(plan.microbatches))
    for stage, microbatch in every:  # not itertools.product, which holds a list of as many microbatches as a file says
        letters = runs.get((stage, microbatch), "")
        if letters in usual:
            continue
        if "F" not in letters:
            raise RequestError(f"{stage}F{microbatch} is missing: every stage runs every microbatch; add it")
        has = ", ".join(kind for kind in "BIW" if kind in letters) or "no backward"
        rule = ": a backward is B, or I and W; give one of the two"
        if plan.forward_only:
            rule = " and the plan is forward only: remove it"
        raise RequestError(f"stage {stage} has {has} for microbatch {microbatch}{rule}")
    return list(warnings.values())


def check_offload(plan: Plan) -> None:
    """Check the offload of the memory policy.

    Raises:
        RequestError: what is wrong, with the action.
    """
    if plan.memory.host_copy_queues not in (1, 2):
        raise RequestError(
            f"memory.host_copy_queues is {plan.memory.host_copy_queues}: a device has 1 queue for both directions, or "
            "2, one for each"
        )
    positions: dict[int, dict[Action, int]] = {}
    for each in plan.memory.offload:
        device = plan.placement[each.stage]
        if device not in positions:
            positions[device] = {action: at for at, action in enumerate(plan.device_actions[device])}
        _check_storages(plan, each)
        _check_microbatches(plan, each)
        for copy in each.copies:
            _check_copy(each.stage, device, copy, positions[device])


def _check_storages(plan: Plan, offload: StageOffload) -> None:
    where = f"memory.offload of stage {offload.stage}"
    if offload.stage in plan.memory.recompute:
        raise RequestError(
            f"{where}: the stage is also in memory.recompute and keeps no saved tensors to offload; remove it from one "
            "of the two"
        )
    if not offload.storages:
        raise RequestError(f"{where} names no storages: name some, or remove the stage")
    counts = Counter(storage.name for storage in offload.storages)
    twice = next((name for name, count in counts.items() if count > 1), None)
    if twice is not None:
        raise RequestError(f"{where} names storage '{twice}' twice: a storage is offloaded once; remove one")
    empty = next((storage for storage in offload.storages if storage.bytes <= 0), None)
    if empty is not None:
        raise RequestError(f"{where}: storage '{empty.name}' has {empty.bytes} bytes: it must be above 0")
    if plan.prediction is not None:
        saved = plan.prediction.costs[offload.stage].saved_bytes
        if offload.bytes > saved:
            raise RequestError(
                f"{where}: its storages have {offload.bytes} bytes, and the stage saves {saved:.0f} bytes of a "
                "microbatch: remove some, or correct the sizes"
            )


def _check_microbatches(plan: Plan, offload: StageOffload) -> None:
    where = f"memory.offload of stage {offload.stage}"
    if not offload.copies:
        raise RequestError(f"{where} has no copies: give one for each offloaded microbatch, or remove the stage")
    microbatches = [copy.microbatch for copy in offload.copies]
    if microbatches != sorted(set(microbatches) & set(range(plan.microbatches))):
        raise RequestError(
            f"{where} has copies of microbatches {microbatches}: they go from 0 to {plan.microbatches - 1}, each at "
            "most once and in order; correct the list"
        )


def _check_copy(stage: int, device: int, copy: HostCopy, positions: Mapping[Action, int]) -> None:
    """F, then freed_at, then reload_after (at the earliest the same action), then the backward."""
    microbatch = copy.microbatch
    where = f"memory.offload of stage {stage}, microbatch {microbatch}"
    for name, action in (("freed_at", copy.freed_at), ("reload_after", copy.reload_after)):
        if action not in positions:
            rule = "is not compute" if action.kind not in COMPUTE_KINDS else f"is not in the order of device {device}"
            raise RequestError(f"{where}: {name} is {action}, which {rule}: name an F, B, I or W of that device")
    forward = Action(stage, Kind.F, microbatch)
    backward = backward_of(stage, microbatch, positions)
    freed, back = positions[copy.freed_at], positions[copy.reload_after]
    if freed <= positions[forward]:
        raise RequestError(
            f"{where}: freed_at is {copy.freed_at}, which is not after {forward}: the copy out starts when that ends; "
            "name a later action"
        )
    if back < freed:
        raise RequestError(
            f"{where}: reload_after is {copy.reload_after}, which is before freed_at, {copy.freed_at}: name that "
            "action or a later one"
        )
    if back >= positions[backward]:
        raise RequestError(
            f"{where}: reload_after is {copy.reload_after}, and {backward} reads the saved tensors, which are on the "
            f"host until {Action(stage, Kind.RELOAD, microbatch)} has ended: name an action before it"
        )


def _check_runs(unshard: StageUnshard, device: int, actions: Sequence[Action]) -> None:
    """Check the runs of one stage.

    Raises:
        RequestError: an action is in no run, runs overlap, or a run starts before it can.
    """
    at = {action: position for position, action in enumerate(actions)}
    stage, ended, covered = unshard.stage, -1, 0
    for number, run in enumerate(unshard.runs):
        where = f"memory.unshard of stage {stage}, run {number}"
        for name, action in (("after", run.after), ("first", run.first), ("last", run.last)):
            if action is not None and action not in at:
                rule = "no compute" if action.kind not in COMPUTE_KINDS else f"not in the order of device {device}"
                raise RequestError(f"{where}: {name} is {action}, which is {rule}: name an F, B, I or W of that device")
        begin = -1 if run.after is None else at[run.after]
        if begin < ended:
            raise RequestError(
                f"{where}: after is {run.after or 'the start of the step'}, which is before the end of run "
                f"{number - 1}, {actions[ended]}: name that action or a later one"
            )
        if run.first is None or run.last is None:
            if run.first is not run.last:
                raise RequestError(f"{where} has only one of first and last: give both, or none")
            ended = max(ended, begin)
            continue
        first, last = at[run.first], at[run.last]
        if run.first.stage != stage or run.last.stage != stage or last < first:
            raise RequestError(
                f"{where} goes from {run.first} to {run.last}: name the first and the last of some actions of stage "
                f"{stage}, in the order of device {device}"
            )
        if begin >= first:
            raise RequestError(
                f"{where}: after is {run.after}, and {run.first} needs the parameters: name an action before it"
            )
        covered += sum(action.stage == stage for action in actions[first : last + 1])
        ended = last
    if covered != sum(action.stage == stage for action in actions):
        raise RequestError(
            f"memory.unshard of stage {stage} has {covered} of its actions in runs: its parameters are whole only "
            "within runs; extend one, or add one"
        )
