"""What a first run of a step sets up in Python, such as a table of positions: right where it is the same for all runs.

A captured step finds nothing set up: it computes the table again for each microbatch, on the stages that read it. In
eager PyTorch the table stays, perhaps with the size that some other batch asked for. So runs on fake tensors, with the
values of what is constant, must compute the same by both ways:

    nothing set up ──▶ run ──▶ run again                                          both alike?
    nothing set up ──▶ other batches ──▶ run ──▶ other batches again              as with nothing set up?

Runs are compared by the operators that depend on the batch, on parameters or on random numbers, and by the values of
the constants that these read.
"""

from collections.abc import Iterable, Sequence

from ..python.doubts import Doubt
from ..python.reached import Reached
from .recorded import Ran, first_difference, read_kept_refusal, refusal_of
from .trial_runs import Leaves, TrialRuns

_MOST = 4
"""Other batches that are tried."""


def refuse_other_set_up(runs: TrialRuns, leaves: Leaves, others: Iterable[Leaves], doubts: Sequence[Doubt]) -> None:
    """Refuse a step that computes something else with what an earlier run set up.

    Args:
        runs: of the step.
        leaves: of the batch that it is captured for.
        others: of batches that it was captured for before.
        doubts: what seems to be set up; where it is not, the first one's refusal is raised.

    Raises:
        RequestError: with the user's line.
    """

    def compare(known: list[Ran], other: list[Ran], when: str) -> None:
        found = first_difference(known, other)
        if found is None and not runs.read_kept:
            return
        if doubts:
            raise doubts[0].refusal
        if runs.read_kept:
            raise read_kept_refusal(runs.read_kept, ())
        assert found is not None
        raise refusal_of(found, "the first run sets something up", when)

    batches = [other for other in others if other != leaves][-_MOST:]
    with runs.apart():  # which buffers are written
        for batch in batches:
            runs.run(batch)
        runs.run(leaves)
        before = runs.now()
        runs.run(leaves)
        _refuse_counts(before, runs.now(), doubts)
        values = runs.values()
    if not runs.ended:
        if doubts:
            raise doubts[0].refusal
        return
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


def _refuse_counts(before: Reached, after: Reached, doubts: Sequence[Doubt]) -> None:
    """Refuse numbers that go on changing, or that are not found again."""
    changed, known = set(), set()
    for place, (_, name) in after.owners.items():
        known.add(name)
        if before.values.get(place) != after.values[place]:
            changed.add(name)
    for doubt in doubts:
        if doubt.number is not None and (doubt.number in changed or doubt.number not in known):
            raise doubt.refusal
