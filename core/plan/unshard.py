"""Unsharding in the memory policy: when the parameters of a stage are whole, where its replicas share them (ZeRO-3).

Each replica holds a part of the parameters. A stage needs them whole while it computes, so the plan gathers them for
*runs* of its actions, and frees them after each::

    compute queue        ─ 0F0 ─ 0F1 ─┬─ 1F0 ─ 1F1 ─ 1B0 ─┬─ 1B1 ─ 0B0 ─ 0B1 ─
                                      │ RESHARD of run 0  │ after           first of run 1
    collective queue     [UNSHARD 0]                      └▶[ UNSHARD 1 ]

The bytes of whole parameters are on the device from the end of ``after`` to the end of ``last``. ``first`` waits for
the all-gather.
"""

from collections.abc import Sequence

from attrs import frozen

from ..actions import COMPUTE_KINDS, Action
from ..errors import RequestError


@frozen
class UnshardedRun:
    """A run of actions of one stage, in the compute order of its device, during which its parameters are whole.

    Args:
        after: the action whose end starts the all-gather; None for the start of the step.
        first, last: the first and the last action of the run; None for a run of microbatches that this replica does not
            have in this step: it takes part in the all-gather.
    """

    after: Action | None
    first: Action | None
    last: Action | None


@frozen
class StageUnshard:
    """The runs of one stage.

    Args:
        stage: the stage.
        runs: in order; each action of the stage is in one.
    """

    stage: int
    runs: tuple[UnshardedRun, ...]


def check_runs(unshard: StageUnshard, device: int, actions: Sequence[Action]) -> None:
    """Check the runs of one stage.

    Args:
        unshard: the runs.
        device: of the stage.
        actions: the compute order of that device.

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
