"""UNSHARD and RESHARD: when the parameters that the replicas of a stage share are gathered, and when they are freed.

::

    compute              0F0 ─ 0F1 ─┬─ 1F0 ─ 1F1 ─ 1B0 ─┬─ 1B1 ─ 0B0 ─ 0B1 ─ ...  STEP ─┐
    UNSHARD     [0, run 0]          │                   └─▶ [0, run 1]                   └▶ [1]
    RESHARD                         └─ 0, run 0

1. Where replicas share parameters, the memory policy names the runs (`unshard`). Both are numbered by the run. The
   first compute action of a run waits for its UNSHARD.
2. Where replicas share the optimizer, or gradients, too, each holds the parameters whole: an UNSHARD without a number
   follows the STEP, and nothing waits for it.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence

from ..actions import AT_START, WORK_KINDS, Action, Kind
from ..costs.costs import StageCosts
from ..errors import RequestError
from .items import Item
from .kinds import AFTER_STEP
from .plan import Plan
from .sharding import shards, shards_parameters


def runs_of(plan: Plan, device: int) -> list[tuple[int, Action]]:
    """The UNSHARD and RESHARD of a device within a step, each with the position that it follows, in order."""
    own = [each for each in plan.memory.unshard if plan.placement[each.stage] == device]
    at = {action: position for position, action in enumerate(plan.device_actions[device] if own else ())}
    found = []
    for each in own:
        for number, run in enumerate(each.runs):
            issued = AT_START if run.after is None else at[run.after]
            freed = issued if run.last is None else at[run.last]
            first = freed if run.first is None else at[run.first]
            found.append((issued, 1, first, Action(each.stage, Kind.UNSHARD, number)))
            found.append((freed, 2 if run.last is None else 0, first, Action(each.stage, Kind.RESHARD, number)))
    # At one position memory is freed first; what is read first is gathered first.
    found.sort(key=lambda each: (*each[:3], each[3].stage))
    return [(position, action) for position, _, _, action in found]


def gathered_bytes(plan: Plan, costs: Sequence[StageCosts], device: int) -> list[float]:
    """Bytes of gathered parameters on a device while each action of its compute order runs.

    Args:
        plan: the plan.
        costs: per stage, of one replica.
        device: its number along the pipeline.
    """
    held, found = 0.0, []
    placed = deque(runs_of(plan, device))
    for position in range(len(plan.device_actions[device])):
        while placed and placed[0][0] < position:
            _, action = placed.popleft()
            held += costs[action.stage].gathered_bytes * (1 if action.kind is Kind.UNSHARD else -1)
        found.append(held)
    return found


def after_steps(plan: Plan, device: int) -> Iterator[tuple[int, Action]]:
    """UNSHARD of the stages whose replicas hold whole parameters of which each steps a part, after their STEP."""
    for stage in plan.stages_on(device):
        if shards(plan, stage.index) and not shards_parameters(plan, stage.index):
            yield AFTER_STEP, Action(stage.index, Kind.UNSHARD)


def whole_at_once(plan: Plan) -> bool:
    """Whether each device has the parameters of all its stages whole at some time of a step."""
    for device in range(plan.devices):
        sharing = {stage.index for stage in plan.stages_on(device) if shards_parameters(plan, stage.index)}
        held, most = set[int](), 0
        for _, action in runs_of(plan, device):
            held = held | {action.stage} if action.kind is Kind.UNSHARD else held - {action.stage}
            most = max(most, len(held))
        if most < len(sharing):
            return False
    return True


def reader_of(compute: Sequence[Action], item: Item) -> int | None:
    """The position of the first compute item that waits for an UNSHARD; None if none does."""
    if item.action.kind is Kind.RESHARD or item.action.microbatch is None:
        return None
    stage = item.action.stage
    later = range(item.issued, len(compute))
    return next((at for at in later if compute[at].stage == stage and compute[at].kind in WORK_KINDS), None)


def check_unsharding(plan: Plan, device: int, compute: Sequence[Action], own: Sequence[Item]) -> None:
    """Check the UNSHARD and RESHARD that a device issues.

    Args:
        plan: the plan.
        device: its number along the pipeline.
        compute: its compute queue.
        own: its items of these kinds, in the order issued.

    Raises:
        RequestError: one is missing or misplaced, or an action computes while the parameters are not whole.
    """
    within = [item for item in own if item.action.microbatch is not None]
    _check_after_steps(plan, device, compute, [item for item in own if item.action.microbatch is None])
    wanted = {
        stage.index: _runs(plan, stage.index)
        for stage in plan.stages_on(device)
        if shards_parameters(plan, stage.index)
    }
    if not within and not wanted:
        return
    due = {
        stage: deque(Action(stage, kind, number) for number in range(count) for kind in (Kind.UNSHARD, Kind.RESHARD))
        for stage, count in wanted.items()
    }
    whole: dict[int, list[int]] = {stage: [] for stage in wanted}  # where the parameters begin and cease to be whole
    for item in within:
        expected = due.get(item.action.stage)
        if not expected or item.action != expected[0]:
            raise RequestError(
                f"device {device} issues {item.action} where the plan has {expected[0] if expected else 'none'}: each "
                "run of a stage whose replicas share parameters has one UNSHARD, and then one RESHARD; move it"
            )
        expected.popleft()
        whole[item.action.stage].append(item.issued)
    for stage, places in whole.items():
        if due[stage]:
            raise RequestError(f"device {device} issues no {due[stage][0]}, which the plan has: add it")
        for at, action in enumerate(compute):
            if action.stage == stage and action.kind in WORK_KINDS and bisect_right(places, at) % 2 == 0:
                raise RequestError(
                    f"device {device} issues {action} where the parameters of stage {stage} are not whole: move it "
                    "between an UNSHARD and its RESHARD"
                )


def _runs(plan: Plan, stage: int) -> int:
    return next((len(each.runs) for each in plan.memory.unshard if each.stage == stage), 0)


def _check_after_steps(plan: Plan, device: int, compute: Sequence[Action], items: Sequence[Item]) -> None:
    """Every stage whose replicas hold whole parameters of which each steps a part has one UNSHARD after its STEP."""
    wanted = {action.stage for _, action in after_steps(plan, device)}
    steps = {action.stage: position for position, action in enumerate(compute) if action.kind is Kind.STEP}
    for item in items:
        stage = item.action.stage
        where = f"device {item.device} issues {item.action}"
        if stage not in wanted:
            raise RequestError(f"{where} and stage {stage} is not sharded, or has one already: remove it")
        wanted.remove(stage)
        if item.issued <= steps.get(stage, -1):
            raise RequestError(f"{where} before {stage}STEP, which computes what it gathers: move it after that")
    if wanted:
        raise RequestError(f"stage {min(wanted)} is sharded and no device issues {min(wanted)}UNSHARD: add it")
