"""Values that the first run of a step sets up in Python, such as a table of positions: allowed if all runs agree.

In a captured step nothing is set up: each stage that reads the table computes it again for each microbatch. In eager
PyTorch the table is kept, possibly with the size that another batch needed. So runs on fake tensors, with the values of
constants, must compute the same in both cases:

    nothing set up ──▶ run ──▶ run again                                          equal?
    nothing set up ──▶ other batches ──▶ run ──▶ other batches again              equal to the runs with nothing set up?

Runs are compared by the operators that depend on the batch, on parameters or on random numbers, and by the values of
the constants that these read.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from ..python.pending_refusals import PendingRefusal
from ..python.reached import Reached
from ..values.user_lines import warn_at
from .kept_number_runs import KeptNumberEffect, follow_kept
from .run_record import RecordedOperator, first_difference, read_kept_refusal, refusal_of
from .trial_runs import Leaves, TrialRuns

_MOST = 4
"""Number of other batches to try."""


def refuse_other_set_up(
    runs: TrialRuns, leaves: Leaves, others: Iterable[Leaves], pending: Sequence[PendingRefusal]
) -> None:
    """Refuse a step that computes something else with values that an earlier run set up.

    Args:
        runs: of the step.
        leaves: of the batch for which it is captured.
        others: of batches for which it was captured before.
        pending: values that seem to be set up; if the step does more, the first one's refusal is raised.

    Raises:
        RequestError: it does; the message has the user's line.
    """

    def compare(known: list[RecordedOperator], other: list[RecordedOperator], when: str) -> None:
        found = first_difference(known, other)
        if found is None and not runs.read_kept:
            return
        if pending:
            raise pending[0].refusal
        if runs.read_kept:
            raise read_kept_refusal(runs.read_kept, ())
        assert found is not None
        raise refusal_of(found, "the first run sets something up", when)

    batches = [other for other in others if other != leaves][-_MOST:]
    with runs.apart():  # to find the written buffers
        for batch in batches:
            runs.run(batch)
        runs.run(leaves)
        before = runs.now()
        runs.run(leaves)
        after = runs.now()
        values = runs.values()
    kept = _kept(before, after, pending)
    if not runs.ended:
        if pending:
            raise pending[0].refusal
        return
    if kept and follow_kept(runs, leaves, kept) != KeptNumberEffect(None, complete=True):
        raise next(each.refusal for each in pending if each.number in kept)
    for each in pending:
        if each.number in kept and each.remark is not None:
            warn_at(*each.remark)
    with runs.apart():
        first = runs.run(leaves, values=values)
        compare(first, runs.run(leaves, values=values), "when it runs again")
    if not batches:
        return
    alone = []
    for batch in batches:
        with runs.apart():
            alone.append(runs.run(batch, values=values))
    with runs.apart():
        for batch in batches:
            runs.run(batch, values=values)
        compare(first, runs.run(leaves, values=values), "after batches of other shapes")
        for batch, found in zip(batches, alone, strict=True):
            compare(found, runs.run(batch, values=values), "after batches of other shapes")


def _kept(before: Reached, after: Reached, pending: Sequence[PendingRefusal]) -> set[Any]:
    """The names of numbers that differ in each run; empty if no pending one does.

    Raises:
        RequestError: a pending number is not found again.
    """
    changed, known = {each.number for each in pending if each.kept}, set[Any]()
    for place, (_, name) in after.owners.items():
        known.add(name)
        if before.values.get(place) != after.values[place]:
            changed.add(name)
    for each in pending:
        if each.number is not None and each.number not in known:
            raise each.refusal
    return changed if any(each.number in changed for each in pending if each.number is not None) else set()
